"""The page at /docs: the API to read and to try, by Swagger UI, and nothing from another host."""
