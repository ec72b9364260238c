"""The run config: schema, reading, validation, suggestions. No torch."""
