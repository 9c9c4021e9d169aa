"""``python -m megatron_ft`` is the command ``megatron-ft``."""

import sys

from megatron_ft.cli.main import main

sys.exit(main())
