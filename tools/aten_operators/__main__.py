import sys
from pathlib import Path

from tools.aten_operators.page import make_page

Path(sys.argv[1]).write_text(make_page(), encoding="utf-8")
