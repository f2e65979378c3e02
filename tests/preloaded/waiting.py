"""Says what it was given, and waits to be ended."""

import os
import sys
import time

if __name__ == "__main__":
    print(sys.argv[1:], os.getcwd(), os.environ["GIVEN"], sys.stdin.read(), flush=True)
    time.sleep(600)
