"""Host and device copies of KV blocks (installed as `kvplugin.kernels`)."""
