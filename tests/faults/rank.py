"""`launch.train` as srun.py starts it: as it is, but for the seconds that it gives an absent MLflow server at its end.

MLflow is not what these rows are about, and the two pauses of a second would be a tenth of the whole suite's time.
"""

from __future__ import annotations

from launch.train import leave, main
from pipeline.tracking import tracking_thread

if __name__ == "__main__":
    tracking_thread._FIRST_PAUSE_SECONDS = 0.05  # pyright: ignore[reportPrivateUsage]
    leave(main())  # as the product's ranks: an ordinary end takes threads apart that C++ may still be in
