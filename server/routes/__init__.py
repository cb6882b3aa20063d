"""HTTP routes, one concept a file. Each builds its router around the service that it is given."""
