"""The run config: sections, loading, validation, suggestions. No torch."""
