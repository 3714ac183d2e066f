"""``python -m kalman_attention``: the command ``kla``, for launchers that start modules."""

import sys

from kalman_attention.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
