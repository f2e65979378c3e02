"""Multi-host runs: choosing the hosts, checking them, starting their ranks."""
