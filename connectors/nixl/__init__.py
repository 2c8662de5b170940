"""Prefill/decode disaggregation over NIXL: a consumer reads KV from a producer.

    producer engine                              consumer engine
    NixlScheduler -- ChannelServer  <--------->  ChannelClient -- NixlScheduler
      leases, generations            MessagePack, HMAC   peers, pulls
    NixlWorker: KV, generations     <---------   NixlWorker: reads on a thread

Control goes from scheduler half to scheduler half over the side channel; bytes from
worker to worker, read by the consumer. `kvplugin.connectors.negotiate` decides how.
"""
