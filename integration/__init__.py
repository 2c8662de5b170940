"""kvplugin inside engines (installed as `kvplugin.integration`)."""
