"""The `kvplugin` command; layers above the core add commands through a hook."""
