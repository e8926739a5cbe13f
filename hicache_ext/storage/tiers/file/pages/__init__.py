"""The layout for file systems that several machines share: files of one page, or of small pages written together."""
