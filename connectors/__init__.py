"""KV connectors that know no engine (installed as `kvplugin.connectors`)."""
