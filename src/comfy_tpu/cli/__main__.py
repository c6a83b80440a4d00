import sys

from comfy_tpu.cli.main import main

sys.exit(main())
