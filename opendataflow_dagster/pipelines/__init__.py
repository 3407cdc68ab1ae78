"""Projects of pipelines: a project.yml, transformations in Python files, and sources."""
