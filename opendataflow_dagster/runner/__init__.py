"""What runs chunks: scripts and Python functions, their claims kept alive meanwhile."""
