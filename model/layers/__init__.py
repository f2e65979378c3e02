"""Heads, dropout, regularisation and activation checkpointing."""
