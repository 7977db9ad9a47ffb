"""The surfaces that other engines know, one package each: their names and meanings, over jattn's own."""
