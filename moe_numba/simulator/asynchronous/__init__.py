"""Hopper's asynchronous instructions: TMA, mbarriers and wgmma."""
