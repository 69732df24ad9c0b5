"""Configuration: Hydra composes (`compose.py`), pydantic checks (`schema.py`), `check.py` asks what can be reached."""
