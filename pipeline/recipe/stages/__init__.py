"""Recipe keys of the stages."""
