"""The per-page-file layout: one file per page, for file systems that several machines share."""
