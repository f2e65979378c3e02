"""A run's processes: process group, exchanges, heartbeats, and detection of hanging, dead and slow ranks."""
