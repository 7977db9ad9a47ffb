"""The core under every surface: layers, backends, metadata, and attention over pages."""
