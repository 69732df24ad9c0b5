"""racelab: run, launch, track and report RACE and RLDS, two lines of LLM reinforcement learning."""

__version__ = "0.1.0"
