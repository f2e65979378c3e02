"""Assemble and run a training stage: the stages, THE loop and its parts."""
