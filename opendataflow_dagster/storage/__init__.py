"""Where chunks lie: folders, files and tables that are written, read, compacted and cleaned."""
