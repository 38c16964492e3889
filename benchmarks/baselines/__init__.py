"""The common practice that the service is compared with: one Serve deployment of a pipeline."""
