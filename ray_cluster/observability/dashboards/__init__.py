"""What Grafana and Prometheus are told of a service, made from one list of metrics."""
