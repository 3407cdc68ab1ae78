"""flow.yml: datasets and jobs as code, planned and applied."""
