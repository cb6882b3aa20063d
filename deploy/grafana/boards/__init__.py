"""Makes the boards in deploy/grafana/dashboards: ``python -m deploy.grafana.boards``."""
