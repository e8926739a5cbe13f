"""The file tier against SGLang's HiCacheFile and the raw disk, as ``hicache-ext bench file`` does, and against rivals.

python -m benchmarks.bench_file --minutes 20 --directory DIRECTORY --markdown FILE.md
"""

import argparse
import sys
from pathlib import Path

from hicache_ext.bench import file
from hicache_ext.cli.main import without_traceback
from hicache_ext.runtime.results import standard_output_of


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from benchmarks.rivals.file import rivals  # so that a rival that is not installed is a sentence

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    file.configure(parser)
    arguments = parser.parse_args()
    with standard_output_of(arguments):
        return file.run(arguments, rivals)


if __name__ == "__main__":
    sys.exit(without_traceback(main))
