"""The bundled extensions: each stands alone, and is the example to copy from."""
