"""What runs on the far side: sent to a fresh interpreter as compiled code, so that it needs no file of racelab there.

These modules import little (no dataclasses, no json, no signal): each program that is run pays for it.
"""
