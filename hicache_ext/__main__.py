"""``python -m hicache_ext``: the command line, as ``hicache-ext``."""

from hicache_ext.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
