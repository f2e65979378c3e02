"""Scripts that measure; what they printed is kept in records/."""
