"""What a server tells Prometheus: the schema, the numbers and their text."""

from server.metrics.adapter import Alias as Alias
from server.metrics.adapter import Metrics as Metrics
from server.metrics.exposition import CONTENT_TYPE as CONTENT_TYPE
from server.metrics.kinds import PREFIX as PREFIX
from server.metrics.labels import GRAMMAR_RESULTS as GRAMMAR_RESULTS
from server.metrics.labels import REJECTIONS as REJECTIONS
from server.metrics.schema import SCHEMA as SCHEMA
