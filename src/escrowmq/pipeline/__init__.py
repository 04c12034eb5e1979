"""What people run on Spark over topics and transactions: `escrowmq pipeline …`."""
