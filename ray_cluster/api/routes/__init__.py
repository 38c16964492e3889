"""The routes, what answers each, and what the OpenAPI document says of them."""
