import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.function.BooleanSupplier;
import org.apache.rocketmq.acl.common.AclClientRPCHook;
import org.apache.rocketmq.acl.common.SessionCredentials;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendCallback;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.RPCHook;

/**
 * Apache's Java client, put through one scenario; compiles against 4.9.7 and 5.5.0.
 *
 * <pre>Driver NAMESRV TOPIC GROUP SCENARIO</pre>
 *
 * Tells on standard output, one JSON object per line, what was sent and what arrived. It judges
 * nothing: whoever started it knows what should have come.
 */
public final class Driver {
    private static final long PATIENCE_MS = 30_000;
    private static final long LINGER_MS = 700; // for what should not come at all
    private static final long NOT_ASKED_MS = 4_000; // longer than any half is left alone
    private static final int MESSAGES = 8;
    private static final int API_MS = 20_000; // a first TLS handshake takes Java seconds
    // Signs every request, if the environment says for which account.
    private static final RPCHook HOOK = System.getenv("INTEROP_ACCESS_KEY") == null ? null
        : new AclClientRPCHook(new SessionCredentials(
            System.getenv("INTEROP_ACCESS_KEY"), System.getenv("INTEROP_SECRET_KEY")));

    private interface Scenario {
        void run() throws Exception;
    }

    /** What to do with a message: true says it was consumed. */
    private interface Taste {
        boolean isFine(MessageExt message);
    }

    private final String namesrv;
    private final String topic;
    private final String group;
    private final List<Runnable> endings = new ArrayList<>();
    private final AtomicInteger arrived = new AtomicInteger();
    private final Map<String, Scenario> scenarios = new LinkedHashMap<>();

    private Driver(String namesrv, String topic, String group) {
        this.namesrv = namesrv;
        this.topic = topic;
        this.group = group;
        scenarios.put("sync", this::sync);
        scenarios.put("async", this::async);
        scenarios.put("oneway", this::oneway);
        scenarios.put("batch", this::batch);
        scenarios.put("big", this::big);
        scenarios.put("autocreate", this::autoCreate);
        scenarios.put("delay", this::delay);
        scenarios.put("timed", this::timed);
        scenarios.put("tags", this::tags);
        scenarios.put("sql", this::sql);
        scenarios.put("sql-refused", this::sqlRefused);
        scenarios.put("orderly", this::orderly);
        scenarios.put("orderly-dlq", this::orderlyDlq);
        scenarios.put("broadcast", this::broadcast);
        scenarios.put("rebalance", this::rebalance);
        scenarios.put("resume", this::resume);
        scenarios.put("retry", this::retry);
        scenarios.put("dlq", () -> dlq(1));
        scenarios.put("dlq-at-once", () -> dlq(0));
        scenarios.put("pull", this::pull);
        scenarios.put("litepull", this::litePull);
        scenarios.put("liteassign", this::liteAssign);
        scenarios.put("query", this::query);
        scenarios.put("reply", this::reply);
        scenarios.put("transaction", this::transaction);
        scenarios.put("transaction-check", this::transactionCheck);
        scenarios.put("transaction-slow", this::transactionSlow);
        scenarios.put("transaction-group", this::transactionGroup);
        scenarios.put("transaction-immunity", this::transactionImmunity);
    }

    public static void main(String[] args) {
        System.setProperty("rocketmq.client.rebalance.waitInterval", "1000"); // 20 s otherwise
        Driver driver = new Driver(args[0], args[1], args[2]);
        int code = 0;
        try {
            driver.scenarios.get(args[3]).run();
            for (Runnable ending : driver.endings) {
                ending.run();
            }
            say("done");
        } catch (Throwable error) {
            say("failed", "why", error.toString());
            error.printStackTrace();
            code = 1;
        }
        System.exit(code);
    }

    // Producing.

    private void sync() throws Exception {
        take(pusher("1", "*"), message -> true);
        DefaultMQProducer producer = producer();
        for (int i = 0; i < MESSAGES; i++) {
            told("sync-" + i, producer.send(message("sync-" + i)));
        }
        await(MESSAGES);
    }

    /** The topic is one that nobody created. A consumer that came before it would find none. */
    private void autoCreate() throws Exception {
        DefaultMQProducer producer = producer();
        for (int i = 0; i < MESSAGES; i++) {
            told("sync-" + i, producer.send(message("sync-" + i)));
        }
        take(pusher("1", "*"), message -> true);
        await(MESSAGES);
    }

    private void async() throws Exception {
        take(pusher("1", "*"), message -> true);
        DefaultMQProducer producer = producer();
        CountDownLatch answered = new CountDownLatch(MESSAGES);
        for (int i = 0; i < MESSAGES; i++) {
            String body = "async-" + i;
            producer.send(message(body), new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    told(body, result);
                    answered.countDown();
                }

                @Override
                public void onException(Throwable error) {
                    say("sent", "body", body, "status", error.toString());
                    answered.countDown();
                }
            });
        }
        answered.await(PATIENCE_MS, TimeUnit.MILLISECONDS);
        await(MESSAGES);
    }

    private void oneway() throws Exception {
        take(pusher("1", "*"), message -> true);
        DefaultMQProducer producer = producer();
        for (int i = 0; i < MESSAGES; i++) {
            producer.sendOneway(message("oneway-" + i));
        }
        await(MESSAGES);
    }

    private void batch() throws Exception {
        take(pusher("1", "*"), message -> true);
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < MESSAGES; i++) {
            messages.add(message("batch-" + i));
        }
        SendResult result = producer().send(messages);
        say("sent", "body", "", "status", status(result),
            "ids", result.getMsgId().split(",").length);
        await(MESSAGES);
    }

    private void big() throws Exception {
        take(pusher("1", "*"), message -> true);
        DefaultMQProducer producer = producer();
        producer.setCompressMsgBodyOverHowmuch(4096);
        for (int size : new int[] {4095, 4097, 100_000}) {
            String body = text(size);
            told(body, producer.send(message(body)));
        }
        await(3);
    }

    private void delay() throws Exception {
        take(pusher("1", "*"), message -> true);
        DefaultMQProducer producer = producer();
        for (int i = 0; i < 3; i++) {
            Message late = message("delay-" + i);
            late.setDelayTimeLevel(1);
            told("delay-" + i, producer.send(late));
        }
        await(3);
    }

    /** Only 5.x has it; found by name, because 4.9.7 must compile this too. */
    private void timed() throws Exception {
        take(pusher("1", "*"), message -> true);
        DefaultMQProducer producer = producer();
        Message[] late = {message("after"), message("at"), message("seconds")};
        set(late[0], "setDelayTimeMs", 1_500);
        set(late[1], "setDeliverTimeMs", System.currentTimeMillis() + 1_500);
        set(late[2], "setDelayTimeSec", 2);
        for (Message message : late) {
            told(body(message), producer.send(message));
        }
        await(late.length);
    }

    // Consuming.

    private void tags() throws Exception {
        take(pusher("1", "red || green"), message -> true);
        DefaultMQProducer producer = producer();
        for (String tag : new String[] {"blue", "red", "", "green", "redder"}) {
            Message message = message("tagged-" + tag);
            message.setTags(tag);
            told(body(message), producer.send(message));
        }
        await(2);
    }

    private void sql() throws Exception {
        DefaultMQPushConsumer consumer = pusher("1", "*");
        consumer.subscribe(topic, MessageSelector.bySql(
            "(price > 10 AND colour IN ('red', 'it''s')) OR (TAGS = 'vip' AND price IS NULL)"));
        take(consumer, message -> true);
        DefaultMQProducer producer = producer();
        String[][] wanted = {{"11", "red", "t"}, {"10", "red", "t"}, {"11", "blue", "t"},
            {"12", "it's", "t"}, {null, "red", "vip"}, {"11.5", "red", "t"}, {null, "red", "t"}};
        for (String[] one : wanted) {
            Message message = message("sql-" + one[0] + "/" + one[1] + "/" + one[2]);
            message.setTags(one[2]);
            if (one[0] != null) {
                message.putUserProperty("price", one[0]);
            }
            message.putUserProperty("colour", one[1]);
            told(body(message), producer.send(message));
        }
        await(3);
    }

    private void sqlRefused() throws Exception {
        DefaultMQPushConsumer consumer = pusher("1", "*");
        consumer.subscribe(topic, MessageSelector.bySql("price > > 10"));
        try {
            take(consumer, message -> true);
        } catch (MQClientException error) {
            say("refused", "code", error.getResponseCode(), "why", error.getMessage());
        }
    }

    private void orderly() throws Exception {
        AtomicInteger running = new AtomicInteger();
        takeInOrder(pusher("1", "*"), message -> {
            if (running.incrementAndGet() > 4) { // four queues, so never more than four
                say("failed", "why", "a queue was consumed twice at a time");
            }
            nap(5);
            running.decrementAndGet();
            // Once, in the middle of its queue: nothing may overtake it.
            return !(body(message).equals("1/2") && message.getReconsumeTimes() == 0);
        });
        DefaultMQProducer producer = producer();
        for (int step = 0; step < 6; step++) {
            for (int order = 0; order < 3; order++) {
                String body = order + "/" + step;
                told(body, producer.send(message(body), (queues, message, which) ->
                    queues.get((Integer) which % queues.size()), order));
            }
        }
        await(3 * 6 + 1);
    }

    private void orderlyDlq() throws Exception {
        DefaultMQPushConsumer consumer = pusher("1", "*");
        consumer.setMaxReconsumeTimes(1);
        takeInOrder(consumer, message -> !body(message).equals("bad"));
        DefaultMQProducer producer = producer();
        for (String body : new String[] {"bad", "good"}) {
            told(body, producer.send(message(body), (queues, message, which) -> queues.get(0), 0));
        }
        await(3);
        drain("%DLQ%" + group, 1);
    }

    private void broadcast() throws Exception {
        for (String by : new String[] {"1", "2"}) {
            DefaultMQPushConsumer consumer = pusher(by, "*");
            // The class of the model has moved between 4.9 and 5: it is not named here.
            consumer.setMessageModel(consumer.getMessageModel().valueOf("BROADCASTING"));
            take(consumer, message -> true);
        }
        DefaultMQProducer producer = producer();
        for (int i = 0; i < MESSAGES; i++) {
            told("broadcast-" + i, producer.send(message("broadcast-" + i)));
        }
        await(2 * MESSAGES);
    }

    private void rebalance() throws Exception {
        List<DefaultMQPushConsumer> both = new ArrayList<>();
        for (String by : new String[] {"1", "2"}) {
            DefaultMQPushConsumer consumer = pusher(by, "*");
            take(consumer, message -> true);
            both.add(consumer);
        }
        until(() -> both.stream().allMatch(consumer -> queuesOf(consumer) == 2));
        for (DefaultMQPushConsumer consumer : both) {
            say("assigned", "by", consumer.getInstanceName(), "queues", queuesOf(consumer));
        }
        DefaultMQProducer producer = producer();
        for (int i = 0; i < 2 * MESSAGES; i++) {
            told("shared-" + i, producer.send(message("shared-" + i)));
        }
        await(2 * MESSAGES);
    }

    private void resume() throws Exception {
        DefaultMQProducer producer = producer();
        for (String by : new String[] {"1", "2"}) {
            for (int i = 0; i < MESSAGES; i++) {
                String body = by + "/" + i;
                told(body, producer.send(message(body)));
            }
            DefaultMQPushConsumer consumer = pusher(by, "*");
            take(consumer, message -> true);
            await(by.equals("1") ? MESSAGES : 2 * MESSAGES);
            consumer.shutdown();
        }
    }

    private void retry() throws Exception {
        take(pusher("1", "*"), message ->
            body(message).equals("fine") || message.getReconsumeTimes() == 2);
        DefaultMQProducer producer = producer();
        told("fine", producer.send(message("fine")));
        told("again", producer.send(message("again")));
        await(4);
    }

    private void dlq(int most) throws Exception {
        DefaultMQPushConsumer consumer = pusher("1", "*");
        consumer.setMaxReconsumeTimes(most);
        take(consumer, message -> false);
        told("dead", producer().send(message("dead")));
        await(1 + most);
        drain("%DLQ%" + group, 1);
    }

    private void pull() throws Exception {
        DefaultMQProducer producer = producer();
        for (int i = 0; i < MESSAGES; i++) {
            told("pulled-" + i, producer.send(message("pulled-" + i)));
        }
        drain(topic, MESSAGES);
        DefaultMQPullConsumer consumer = puller("2");
        for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(topic)) {
            long end = consumer.maxOffset(queue);
            say("queue", "queue", queue.getQueueId(), "begin", consumer.minOffset(queue),
                "end", end, "first", consumer.searchOffset(queue, 0),
                "committed", consumer.fetchConsumeOffset(queue, true));
            PullResult beyond = consumer.pull(queue, "*", end + 10, 32);
            say("beyond", "status", beyond.getPullStatus(), "next", beyond.getNextBeginOffset());
        }
        // A pull that waits is answered by what arrives meanwhile.
        MessageQueue first = consumer.fetchSubscribeMessageQueues(topic).stream()
            .filter(queue -> queue.getQueueId() == 0).findFirst().get();
        long end = consumer.maxOffset(first);
        new Thread(() -> {
            nap(300);
            try {
                producer.send(message("awaited"), first);
            } catch (Exception error) {
                say("failed", "why", error.toString());
            }
        }).start();
        long began = System.nanoTime();
        PullResult found = consumer.pullBlockIfNotFound(first, "*", end, 32);
        say("awaited", "status", found.getPullStatus(),
            "ms", TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - began));
        consumer.updateConsumeOffset(first, found.getNextBeginOffset());
    }

    private void litePull() throws Exception {
        DefaultMQProducer producer = producer();
        for (int i = 0; i < MESSAGES; i++) {
            told("lite-" + i, producer.send(message("lite-" + i)));
        }
        DefaultLitePullConsumer consumer = litePuller("1");
        consumer.subscribe(topic, "*");
        consumer.start();
        poll(consumer, MESSAGES);
        consumer.commitSync();
        consumer.shutdown();
        told("lite-later", producer.send(message("lite-later")));
        DefaultLitePullConsumer next = litePuller("2");
        next.subscribe(topic, "*");
        next.start();
        poll(next, MESSAGES + 1);
        next.shutdown();
    }

    private void liteAssign() throws Exception {
        DefaultMQProducer producer = producer();
        MessageQueue queue = producer.fetchPublishMessageQueues(topic).get(0);
        for (int i = 0; i < MESSAGES; i++) {
            told("seek-" + i, producer.send(message("seek-" + i), queue));
        }
        DefaultLitePullConsumer consumer = litePuller("1");
        consumer.start();
        consumer.assign(Collections.singletonList(queue));
        consumer.seek(queue, MESSAGES - 3);
        poll(consumer, 3);
        consumer.shutdown();
    }

    // Asking, and being answered.

    private void query() throws Exception {
        DefaultMQProducer producer = producer();
        Message message = message("sought");
        message.setKeys(Arrays.asList("one-" + group, "two-" + group));
        SendResult result = producer.send(message);
        told("sought", result);
        told("other", producer.send(message("other")));
        long now = System.currentTimeMillis();
        for (String key : new String[] {"one-" + group, "two-" + group, "nowhere-" + group}) {
            until(() -> {
                try {
                    producer.queryMessage(topic, key, 32, now - 60_000, now + 60_000)
                        .getMessageList().forEach(found -> got("key " + key, found));
                    return true;
                } catch (MQClientException none) {
                    return key.startsWith("nowhere"); // the index may follow a little later
                } catch (InterruptedException error) {
                    throw new IllegalStateException(error);
                }
            });
        }
        got("offset id", producer.viewMessage(topic, result.getOffsetMsgId()));
        got("unique key", producer.viewMessage(topic, result.getMsgId()));
    }

    private void reply() throws Exception {
        DefaultMQProducer replier = producer("2");
        take(pusher("1", "*"), message -> {
            try {
                byte[] answer = ("answer to " + body(message)).getBytes(StandardCharsets.UTF_8);
                SendResult result = replier.send(MessageUtil.createReplyMessage(message, answer));
                say("replied", "status", status(result));
            } catch (Exception error) {
                say("failed", "why", error.toString());
            }
            return true;
        });
        DefaultMQProducer asker = producer();
        for (int i = 0; i < 3; i++) {
            Message answer = asker.request(message("question-" + i), 10_000);
            say("answered", "body", body(answer));
        }
    }

    // Transactions. What a message says first, its local transaction says; what follows are the
    // answers to the checks, the last of them for good: "unknown,unknown,commit/2".

    private void transaction() throws Exception {
        take(pusher("1", "*"), message -> true);
        TransactionMQProducer producer = transactor("1", Driver::planned);
        for (int i = 0; i < MESSAGES; i++) {
            for (String plan : new String[] {"commit", "rollback"}) {
                park(producer, message(plan + "/" + i));
            }
        }
        producer.setCompressMsgBodyOverHowmuch(4096);
        park(producer, message("commit/" + text(20_000)));
        await(MESSAGES + 1);
        nap(NOT_ASKED_MS);
    }

    private void transactionCheck() throws Exception {
        take(pusher("1", "*"), message -> true);
        TransactionMQProducer producer = transactor("1", Driver::planned);
        String[] plans = {
            "unknown,commit", "unknown,rollback", "throw,commit", "throw,rollback", "null,commit",
            "unknown,unknown,commit", "unknown,throw,rollback", "commit", "rollback",
        };
        for (int i = 0; i < 3; i++) {
            for (String plan : plans) {
                park(producer, message(plan + "/" + i));
            }
        }
        await(3 * 5);
        nap(NOT_ASKED_MS);
    }

    /** The local transaction outlasts the first check, whatever that is told. */
    private void transactionSlow() throws Exception {
        take(pusher("1", "*"), message -> true);
        Map<String, CountDownLatch> asked = new ConcurrentHashMap<>();
        String[] plans = {"unknown", "commit", "rollback"}; // the checks' answers
        for (String plan : plans) {
            asked.put(plan + "/slow", new CountDownLatch(1));
        }
        TransactionMQProducer producer = transactor("1", (message, check) -> {
            String body = body(message);
            if (check > 0) {
                asked.get(body).countDown();
                return state(body.split("/")[0]);
            }
            try {
                if (!asked.get(body).await(PATIENCE_MS, TimeUnit.MILLISECONDS)) {
                    say("failed", "why", "nobody asked about " + body);
                }
            } catch (InterruptedException error) {
                throw new IllegalStateException(error);
            }
            nap(300); // by then the check has its answer
            return LocalTransactionState.COMMIT_MESSAGE;
        });
        for (String plan : plans) {
            park(producer, message(plan + "/slow"));
        }
        await(2);
        nap(NOT_ASKED_MS);
    }

    /** Of three in one group one leaves: the others are asked what it left. */
    private void transactionGroup() throws Exception {
        take(pusher("1", "*"), message -> true);
        List<TransactionMQProducer> both = new ArrayList<>();
        for (String by : new String[] {"1", "2"}) {
            both.add(transactor(by, Driver::planned));
        }
        for (int i = 0; i < MESSAGES; i++) {
            for (int by = 1; by <= 2; by++) {
                park(both.get(by - 1), message("unknown,commit/" + by + "/" + i));
            }
        }
        TransactionMQProducer gone = transactor("gone", Driver::planned);
        for (int i = 0; i < MESSAGES; i++) {
            park(gone, message("unknown,commit/heirs/" + i));
        }
        gone.shutdown();
        await(3 * MESSAGES);
        nap(NOT_ASKED_MS);
    }

    /** As text, as users write it: the property has no type. */
    private void transactionImmunity() throws Exception {
        take(pusher("1", "*"), message -> true);
        CountDownLatch late = new CountDownLatch(1);
        TransactionMQProducer producer = transactor("1", (message, check) -> {
            if (check == 0 && body(message).startsWith("commit")) {
                late.countDown();
                nap(3_500); // past transactionTimeOut, inside its own time
            }
            return planned(message, check);
        });
        Thread within = new Thread(() -> {
            try {
                park(producer, immune("commit/within", "6"));
            } catch (Exception error) {
                say("failed", "why", error.toString());
            }
        });
        within.start();
        late.await(PATIENCE_MS, TimeUnit.MILLISECONDS);
        for (String seconds : new String[] {"5", "1", "-1", "soon"}) {
            park(producer, immune("unknown,commit/" + seconds, seconds));
        }
        within.join(PATIENCE_MS);
        await(5);
        nap(NOT_ASKED_MS);
    }

    private Message immune(String body, String seconds) {
        Message message = message(body);
        message.putUserProperty("CHECK_IMMUNITY_TIME_IN_SECONDS", seconds);
        return message;
    }

    /** What is to become of a message: at first (0), and at its first, second, ... check. */
    private interface Plan {
        LocalTransactionState state(Message message, int check);
    }

    private static LocalTransactionState planned(Message message, int check) {
        String[] plan = body(message).split("/")[0].split(",");
        return state(plan[Math.min(check, plan.length - 1)]);
    }

    private static LocalTransactionState state(String name) {
        switch (name) {
            case "commit":
                return LocalTransactionState.COMMIT_MESSAGE;
            case "rollback":
                return LocalTransactionState.ROLLBACK_MESSAGE;
            case "throw":
                throw new IllegalStateException("as planned");
            case "null":
                return null;
            default:
                return LocalTransactionState.UNKNOW;
        }
    }

    private void park(TransactionMQProducer producer, Message message) throws Exception {
        told(body(message), producer.sendMessageInTransaction(message, null));
    }

    private TransactionMQProducer transactor(String name, Plan plan) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer(group + "-transactors", HOOK);
        producer.setNamesrvAddr(namesrv);
        producer.setMqClientApiTimeout(API_MS);
        producer.setInstanceName("transactor-" + name);
        producer.setSendMsgTimeout(5_000);
        Map<String, AtomicInteger> checks = new ConcurrentHashMap<>();
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object none) {
                say("local", "by", name, "body", body(message),
                    "id", message.getTransactionId());
                return plan.state(message, 0);
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                int check = checks.computeIfAbsent(body(message), none -> new AtomicInteger())
                    .incrementAndGet();
                say("asked", "by", name, "body", body(message), "topic", message.getTopic(),
                    "id", message.getTransactionId(), "check", check,
                    "times", message.getUserProperty("TRANSACTION_CHECK_TIMES"),
                    "tag", message.getTags(), "key", message.getKeys(),
                    "colour", message.getUserProperty("colour"),
                    "waited_ms", System.currentTimeMillis() - message.getBornTimestamp());
                return plan.state(message, check);
            }
        });
        producer.start();
        endings.add(producer::shutdown);
        return producer;
    }

    // Clients.

    private DefaultMQProducer producer() throws Exception {
        return producer("1");
    }

    private DefaultMQProducer producer(String name) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(group + "-producers-" + name, HOOK);
        producer.setNamesrvAddr(namesrv);
        producer.setMqClientApiTimeout(API_MS);
        producer.setInstanceName("producer-" + name);
        producer.setSendMsgTimeout(5_000);
        producer.start();
        endings.add(producer::shutdown);
        return producer;
    }

    private DefaultMQPushConsumer pusher(String name, String tags) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group, HOOK,
            new AllocateMessageQueueAveragely());
        consumer.setNamesrvAddr(namesrv);
        consumer.setMqClientApiTimeout(API_MS);
        consumer.setInstanceName(name);
        // A new group asks for the route of its retry topic before its first heartbeat makes
        // that topic, and then not for 30 s. No broker can help it; asking more often does.
        consumer.setPollNameServerInterval(1_000);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeThreadMin(4);
        consumer.setConsumeThreadMax(4);
        consumer.subscribe(topic, tags);
        endings.add(consumer::shutdown);
        return consumer;
    }

    private DefaultMQPullConsumer puller(String name) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(group + "-pullers", HOOK);
        consumer.setNamesrvAddr(namesrv);
        consumer.setMqClientApiTimeout(API_MS);
        consumer.setInstanceName("puller-" + name);
        consumer.start();
        endings.add(consumer::shutdown);
        return consumer;
    }

    private DefaultLitePullConsumer litePuller(String name) {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(group, HOOK);
        consumer.setNamesrvAddr(namesrv);
        consumer.setMqClientApiTimeout(API_MS);
        consumer.setInstanceName(name);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        return consumer;
    }

    private void take(DefaultMQPushConsumer consumer, Taste taste) throws Exception {
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            boolean fine = true;
            for (MessageExt message : messages) {
                fine &= taste.isFine(message);
                got(consumer.getInstanceName(), message);
            }
            context.setDelayLevelWhenNextConsume(1);
            return fine ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS
                : ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.start();
    }

    private void takeInOrder(DefaultMQPushConsumer consumer, Taste taste) throws Exception {
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            boolean fine = true;
            for (MessageExt message : messages) {
                fine &= taste.isFine(message);
                got(consumer.getInstanceName(), message);
            }
            context.setSuspendCurrentQueueTimeMillis(100);
            return fine ? ConsumeOrderlyStatus.SUCCESS
                : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
        });
        consumer.start();
    }

    /** Pull every queue of a topic from where the group stands until so many have come. */
    private void drain(String from, int count) throws Exception {
        DefaultMQPullConsumer consumer = puller("1");
        int before = arrived.get();
        until(() -> {
            try {
                for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(from)) {
                    long at = Math.max(0, consumer.fetchConsumeOffset(queue, false));
                    PullResult result = consumer.pull(queue, "*", at, 32);
                    if (result.getPullStatus() == PullStatus.FOUND) {
                        result.getMsgFoundList().forEach(message -> got("pull", message));
                    }
                    consumer.updateConsumeOffset(queue, result.getNextBeginOffset());
                }
            } catch (Exception notYet) {
                say("note", "why", notYet.toString());
                nap(500); // a topic that is made by its first message has no route before
            }
            return arrived.get() - before >= count;
        });
        for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(from)) {
            consumer.getOffsetStore().persist(queue);
        }
    }

    private void poll(DefaultLitePullConsumer consumer, int count) {
        until(() -> {
            consumer.poll(500).forEach(message -> got(consumer.getInstanceName(), message));
            return arrived.get() >= count;
        });
    }

    private static int queuesOf(DefaultMQPushConsumer consumer) {
        return (int) consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl()
            .getProcessQueueTable().keySet().stream()
            .filter(queue -> !queue.getTopic().startsWith("%RETRY%")).count();
    }

    // Messages.

    private Message message(String body) {
        Message message =
            new Message(topic, "tag", "key-" + body.length(), body.getBytes(StandardCharsets.UTF_8));
        message.putUserProperty("colour", "größer");
        return message;
    }

    private static String body(Message message) {
        return new String(message.getBody(), StandardCharsets.UTF_8);
    }

    private static String text(int size) {
        StringBuilder text = new StringBuilder();
        while (text.length() < size) {
            text.append(text.length()).append(' ');
        }
        return text.substring(0, size);
    }

    private static void set(Message message, String setter, long value) throws Exception {
        Message.class.getMethod(setter, long.class).invoke(message, value);
    }

    // Waiting.

    private void await(int count) {
        until(() -> arrived.get() >= count);
        nap(LINGER_MS);
    }

    private static void until(BooleanSupplier condition) {
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(PATIENCE_MS);
        while (!condition.getAsBoolean() && System.nanoTime() < deadline) {
            nap(50);
        }
    }

    private static void nap(long ms) {
        try {
            Thread.sleep(ms);
        } catch (InterruptedException error) {
            throw new IllegalStateException(error);
        }
    }

    // Telling.

    private static String status(SendResult result) {
        return result.getSendStatus() == SendStatus.SEND_OK ? "ok" : result.getSendStatus().name();
    }

    private static void told(String body, SendResult result) {
        say("sent", "body", body, "status", status(result), "id", result.getMsgId(),
            "queue", result.getMessageQueue().getQueueId(), "offset", result.getQueueOffset());
    }

    private void got(String by, MessageExt message) {
        say("got", "by", by, "body", body(message), "topic", message.getTopic(),
            "times", message.getReconsumeTimes(), "queue", message.getQueueId(),
            "offset", message.getQueueOffset(), "tag", message.getTags(),
            "key", message.getKeys(), "colour", message.getUserProperty("colour"),
            "id", message.getMsgId(),
            "waited_ms", System.currentTimeMillis() - message.getBornTimestamp());
        arrived.incrementAndGet();
    }

    private static synchronized void say(String event, Object... pairs) {
        StringBuilder line = new StringBuilder("{\"event\":").append(quoted(event));
        for (int i = 0; i < pairs.length; i += 2) {
            Object value = pairs[i + 1];
            line.append(',').append(quoted((String) pairs[i])).append(':')
                .append(value == null || value instanceof Number ? value : quoted(value.toString()));
        }
        System.out.println(line.append('}'));
        System.out.flush();
    }

    private static String quoted(String text) {
        StringBuilder out = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\' || c < ' ' || c > '~') {
                out.append(String.format("\\u%04x", (int) c));
            } else {
                out.append(c);
            }
        }
        return out.append('"').toString();
    }
}
