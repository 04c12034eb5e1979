"""asyncio: when things happen. What happens is decided below, where nothing waits."""
