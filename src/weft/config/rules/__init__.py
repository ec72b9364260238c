"""The rules of a run config, one module a phase: values, sections, layout, unused keys; `config_checks` binds them."""
