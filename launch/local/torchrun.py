"""Run torchrun without its traceback, and exit with the first failed rank's code: torchrun's own is always 1, which
hides a user error (2) and a stop after saving (75)."""

import sys

from shardvit.data_shards.working_folder import leave_out
from shardvit.launch.local.output import go_on


def main() -> int:
    """Run with torchrun's own arguments."""
    leave_out()
    go_on()
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode  # for a signal -n, which the shell sees as 256 - n
    except SignalException as error:  # torchrun waited half a minute for the ranks to save, and killed the rest
        return 128 + int(error.sigval)
    return 0


if __name__ == "__main__":
    sys.exit(main())
