"""Checks of the engine layer on a GPU; `run.sh` runs them, and on the host device everywhere."""
