import sys
from pathlib import Path

from tools.porting_table.page import write_page

write_page(Path(sys.argv[1]))
