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
 * Runs a scenario with Apache's Java client. Compiles with 4.9.7 and with 5.5.0.
 *
 * <pre>Driver NAMESRV TOPIC GROUP SCENARIO</pre>
 *
 * Prints an event as a line of JSON for each message that it sends or receives. The test that
 * started it checks these events.
 */
public final class Driver {
    private static final long TIMEOUT_MS = 30_000;
    // Only time can show that nothing more arrives: a message, or a check of a half.
    private static final long NO_MORE_MESSAGES_MS = 700;
    private static final long NO_MORE_CHECKS_MS = 4_000; // longer than the immunity of any half
    private static final int MESSAGES = 8;
    private static final int API_TIMEOUT_MS = 20_000; // the first TLS handshake takes seconds
    // Signs every request if the environment has an account.
    private static final RPCHook ACL_HOOK = System.getenv("INTEROP_ACCESS_KEY") == null ? null
        : new AclClientRPCHook(new SessionCredentials(
            System.getenv("INTEROP_ACCESS_KEY"), System.getenv("INTEROP_SECRET_KEY")));

    private interface Scenario {
        void run() throws Exception;
    }

    /** Handles a message and returns whether it was consumed. */
    private interface Handler {
        boolean handle(MessageExt message);
    }

    private final String namesrv;
    private final String topic;
    private final String group;
    private final List<Runnable> shutdowns = new ArrayList<>();
    private final AtomicInteger receivedCount = new AtomicInteger();
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
            driver.shutdowns.forEach(Runnable::run);
            report("done");
        } catch (Throwable error) {
            report("failed", "reason", error.toString());
            error.printStackTrace();
            code = 1;
        }
        System.exit(code);
    }

    // Producers.

    private void sync() throws Exception {
        consume(pushConsumer("1", "*"), message -> true);
        DefaultMQProducer producer = producer();
        for (int i = 0; i < MESSAGES; i++) {
            reportSent("sync-" + i, producer.send(message("sync-" + i)));
        }
        awaitMessages(MESSAGES);
    }

    /** The first message creates the topic. A consumer that started earlier would have no route. */
    private void autoCreate() throws Exception {
        DefaultMQProducer producer = producer();
        for (int i = 0; i < MESSAGES; i++) {
            reportSent("sync-" + i, producer.send(message("sync-" + i)));
        }
        consume(pushConsumer("1", "*"), message -> true);
        awaitMessages(MESSAGES);
    }

    private void async() throws Exception {
        consume(pushConsumer("1", "*"), message -> true);
        DefaultMQProducer producer = producer();
        CountDownLatch responses = new CountDownLatch(MESSAGES);
        for (int i = 0; i < MESSAGES; i++) {
            String body = "async-" + i;
            producer.send(message(body), new SendCallback() {
                @Override
                public void onSuccess(SendResult result) {
                    reportSent(body, result);
                    responses.countDown();
                }

                @Override
                public void onException(Throwable error) {
                    report("sent", "body", body, "status", error.toString());
                    responses.countDown();
                }
            });
        }
        responses.await(TIMEOUT_MS, TimeUnit.MILLISECONDS);
        awaitMessages(MESSAGES);
    }

    private void oneway() throws Exception {
        consume(pushConsumer("1", "*"), message -> true);
        DefaultMQProducer producer = producer();
        for (int i = 0; i < MESSAGES; i++) {
            producer.sendOneway(message("oneway-" + i));
        }
        awaitMessages(MESSAGES);
    }

    private void batch() throws Exception {
        consume(pushConsumer("1", "*"), message -> true);
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < MESSAGES; i++) {
            messages.add(message("batch-" + i));
        }
        SendResult result = producer().send(messages);
        report("sent", "body", "", "status", status(result),
            "ids", result.getMsgId().split(",").length);
        awaitMessages(MESSAGES);
    }

    private void big() throws Exception {
        consume(pushConsumer("1", "*"), message -> true);
        DefaultMQProducer producer = producer();
        producer.setCompressMsgBodyOverHowmuch(4096);
        for (int size : new int[] {4095, 4097, 100_000}) {
            String body = text(size);
            reportSent(body, producer.send(message(body)));
        }
        awaitMessages(3);
    }

    private void delay() throws Exception {
        consume(pushConsumer("1", "*"), message -> true);
        DefaultMQProducer producer = producer();
        for (int i = 0; i < 3; i++) {
            Message delayed = message("delay-" + i);
            delayed.setDelayTimeLevel(1);
            reportSent("delay-" + i, producer.send(delayed));
        }
        awaitMessages(3);
    }

    /** Uses methods that only 5.5.0 has, by reflection, because 4.9.7 has to compile this too. */
    private void timed() throws Exception {
        consume(pushConsumer("1", "*"), message -> true);
        DefaultMQProducer producer = producer();
        Message[] delayed = {message("after"), message("at"), message("seconds")};
        set(delayed[0], "setDelayTimeMs", 1_500);
        set(delayed[1], "setDeliverTimeMs", System.currentTimeMillis() + 1_500);
        set(delayed[2], "setDelayTimeSec", 2);
        for (Message message : delayed) {
            reportSent(body(message), producer.send(message));
        }
        awaitMessages(delayed.length);
    }

    // Consumers.

    private void tags() throws Exception {
        consume(pushConsumer("1", "red || green"), message -> true);
        DefaultMQProducer producer = producer();
        for (String tag : new String[] {"blue", "red", "", "green", "redder"}) {
            Message message = message("tagged-" + tag);
            message.setTags(tag);
            reportSent(body(message), producer.send(message));
        }
        awaitMessages(2);
    }

    private void sql() throws Exception {
        DefaultMQPushConsumer consumer = pushConsumer("1", "*");
        consumer.subscribe(topic, MessageSelector.bySql(
            "(price > 10 AND colour IN ('red', 'it''s')) OR (TAGS = 'vip' AND price IS NULL)"));
        consume(consumer, message -> true);
        DefaultMQProducer producer = producer();
        String[][] rows = {{"11", "red", "t"}, {"10", "red", "t"}, {"11", "blue", "t"},
            {"12", "it's", "t"}, {null, "red", "vip"}, {"11.5", "red", "t"}, {null, "red", "t"}};
        for (String[] row : rows) {
            Message message = message("sql-" + row[0] + "/" + row[1] + "/" + row[2]);
            message.setTags(row[2]);
            if (row[0] != null) {
                message.putUserProperty("price", row[0]);
            }
            message.putUserProperty("colour", row[1]);
            reportSent(body(message), producer.send(message));
        }
        awaitMessages(3);
    }

    private void sqlRefused() throws Exception {
        DefaultMQPushConsumer consumer = pushConsumer("1", "*");
        consumer.subscribe(topic, MessageSelector.bySql("price > > 10"));
        try {
            consume(consumer, message -> true);
        } catch (MQClientException error) {
            report("refused", "code", error.getResponseCode(), "reason", error.getMessage());
        }
    }

    private void orderly() throws Exception {
        AtomicInteger running = new AtomicInteger();
        consumeInOrder(pushConsumer("1", "*"), message -> {
            if (running.incrementAndGet() > 4) { // there are four queues
                report("failed", "reason", "a queue was consumed by two threads at a time");
            }
            sleep(5);
            running.decrementAndGet();
            // Fails once, in the middle of its queue: no message may overtake it.
            return !(body(message).equals("1/2") && message.getReconsumeTimes() == 0);
        });
        DefaultMQProducer producer = producer();
        for (int step = 0; step < 6; step++) {
            for (int order = 0; order < 3; order++) {
                String body = order + "/" + step;
                reportSent(body, producer.send(message(body), (queues, message, key) ->
                    queues.get((Integer) key % queues.size()), order));
            }
        }
        awaitMessages(3 * 6 + 1);
    }

    private void orderlyDlq() throws Exception {
        DefaultMQPushConsumer consumer = pushConsumer("1", "*");
        consumer.setMaxReconsumeTimes(1);
        consumeInOrder(consumer, message -> !body(message).equals("bad"));
        DefaultMQProducer producer = producer();
        for (String body : new String[] {"bad", "good"}) {
            reportSent(body,
                producer.send(message(body), (queues, message, key) -> queues.get(0), 0));
        }
        awaitMessages(3);
        drain("%DLQ%" + group, 1);
    }

    private void broadcast() throws Exception {
        for (String client : new String[] {"1", "2"}) {
            DefaultMQPushConsumer consumer = pushConsumer(client, "*");
            // The class of the model is in another package in 4.9.7, so it is not named here.
            consumer.setMessageModel(consumer.getMessageModel().valueOf("BROADCASTING"));
            consume(consumer, message -> true);
        }
        DefaultMQProducer producer = producer();
        for (int i = 0; i < MESSAGES; i++) {
            reportSent("broadcast-" + i, producer.send(message("broadcast-" + i)));
        }
        awaitMessages(2 * MESSAGES);
    }

    private void rebalance() throws Exception {
        List<DefaultMQPushConsumer> consumers = new ArrayList<>();
        for (String client : new String[] {"1", "2"}) {
            DefaultMQPushConsumer consumer = pushConsumer(client, "*");
            consume(consumer, message -> true);
            consumers.add(consumer);
        }
        waitUntil(() -> consumers.stream().allMatch(consumer -> queuesOf(consumer) == 2));
        for (DefaultMQPushConsumer consumer : consumers) {
            report("assigned", "client", consumer.getInstanceName(), "queues", queuesOf(consumer));
        }
        DefaultMQProducer producer = producer();
        for (int i = 0; i < 2 * MESSAGES; i++) {
            reportSent("shared-" + i, producer.send(message("shared-" + i)));
        }
        awaitMessages(2 * MESSAGES);
    }

    private void resume() throws Exception {
        DefaultMQProducer producer = producer();
        for (String client : new String[] {"1", "2"}) {
            for (int i = 0; i < MESSAGES; i++) {
                String body = client + "/" + i;
                reportSent(body, producer.send(message(body)));
            }
            DefaultMQPushConsumer consumer = pushConsumer(client, "*");
            consume(consumer, message -> true);
            awaitMessages(client.equals("1") ? MESSAGES : 2 * MESSAGES);
            consumer.shutdown();
        }
    }

    private void retry() throws Exception {
        consume(pushConsumer("1", "*"), message ->
            body(message).equals("fine") || message.getReconsumeTimes() == 2);
        DefaultMQProducer producer = producer();
        reportSent("fine", producer.send(message("fine")));
        reportSent("again", producer.send(message("again")));
        awaitMessages(4);
    }

    private void dlq(int maxReconsumeTimes) throws Exception {
        DefaultMQPushConsumer consumer = pushConsumer("1", "*");
        consumer.setMaxReconsumeTimes(maxReconsumeTimes);
        consume(consumer, message -> false);
        reportSent("dead", producer().send(message("dead")));
        awaitMessages(1 + maxReconsumeTimes);
        drain("%DLQ%" + group, 1);
    }

    private void pull() throws Exception {
        DefaultMQProducer producer = producer();
        for (int i = 0; i < MESSAGES; i++) {
            reportSent("pulled-" + i, producer.send(message("pulled-" + i)));
        }
        drain(topic, MESSAGES);
        DefaultMQPullConsumer consumer = pullConsumer("2");
        for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(topic)) {
            long end = consumer.maxOffset(queue);
            report("queue", "queue", queue.getQueueId(), "begin", consumer.minOffset(queue),
                "end", end, "first", consumer.searchOffset(queue, 0),
                "committed", consumer.fetchConsumeOffset(queue, true));
            PullResult beyond = consumer.pull(queue, "*", end + 10, 32);
            report("beyond", "status", beyond.getPullStatus(), "next", beyond.getNextBeginOffset());
        }
        // A message that arrives in the meantime ends a long poll.
        MessageQueue first = consumer.fetchSubscribeMessageQueues(topic).stream()
            .filter(queue -> queue.getQueueId() == 0).findFirst().get();
        long end = consumer.maxOffset(first);
        new Thread(() -> {
            sleep(300); // by then the pull waits at the broker
            try {
                producer.send(message("awaited"), first);
            } catch (Exception error) {
                report("failed", "reason", error.toString());
            }
        }).start();
        long startNanos = System.nanoTime();
        PullResult result = consumer.pullBlockIfNotFound(first, "*", end, 32);
        report("awaited", "status", result.getPullStatus(),
            "ms", TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - startNanos));
        consumer.updateConsumeOffset(first, result.getNextBeginOffset());
    }

    private void litePull() throws Exception {
        DefaultMQProducer producer = producer();
        for (int i = 0; i < MESSAGES; i++) {
            reportSent("lite-" + i, producer.send(message("lite-" + i)));
        }
        DefaultLitePullConsumer consumer = litePullConsumer("1");
        consumer.subscribe(topic, "*");
        consumer.start();
        poll(consumer, MESSAGES);
        consumer.commitSync();
        consumer.shutdown();
        reportSent("lite-later", producer.send(message("lite-later")));
        DefaultLitePullConsumer second = litePullConsumer("2");
        second.subscribe(topic, "*");
        second.start();
        poll(second, MESSAGES + 1);
        second.shutdown();
    }

    private void liteAssign() throws Exception {
        DefaultMQProducer producer = producer();
        MessageQueue queue = producer.fetchPublishMessageQueues(topic).get(0);
        for (int i = 0; i < MESSAGES; i++) {
            reportSent("seek-" + i, producer.send(message("seek-" + i), queue));
        }
        DefaultLitePullConsumer consumer = litePullConsumer("1");
        consumer.start();
        consumer.assign(Collections.singletonList(queue));
        consumer.seek(queue, MESSAGES - 3);
        poll(consumer, 3);
        consumer.shutdown();
    }

    // Queries, and requests with replies.

    private void query() throws Exception {
        DefaultMQProducer producer = producer();
        Message message = message("sought");
        message.setKeys(Arrays.asList("one-" + group, "two-" + group));
        SendResult result = producer.send(message);
        reportSent("sought", result);
        reportSent("other", producer.send(message("other")));
        long now = System.currentTimeMillis();
        for (String key : new String[] {"one-" + group, "two-" + group, "nowhere-" + group}) {
            waitUntil(() -> {
                try {
                    producer.queryMessage(topic, key, 32, now - 60_000, now + 60_000)
                        .getMessageList().forEach(match -> reportReceived("key " + key, match));
                    return true;
                } catch (MQClientException noMessage) {
                    return key.startsWith("nowhere"); // the broker indexes a little later
                } catch (InterruptedException error) {
                    throw new IllegalStateException(error);
                }
            });
        }
        reportReceived("offset id", producer.viewMessage(topic, result.getOffsetMsgId()));
        reportReceived("unique key", producer.viewMessage(topic, result.getMsgId()));
    }

    private void reply() throws Exception {
        DefaultMQProducer replier = producer("2");
        consume(pushConsumer("1", "*"), message -> {
            try {
                byte[] reply = ("reply to " + body(message)).getBytes(StandardCharsets.UTF_8);
                SendResult result = replier.send(MessageUtil.createReplyMessage(message, reply));
                report("reply-sent", "status", status(result));
            } catch (Exception error) {
                report("failed", "reason", error.toString());
            }
            return true;
        });
        DefaultMQProducer requester = producer();
        for (int i = 0; i < 3; i++) {
            Message reply = requester.request(message("request-" + i), 10_000);
            report("reply-received", "body", body(reply));
        }
    }

    // Transactions. A body starts with a plan: the verdict of the local transaction, then those of
    // the checks, for example "unknown,unknown,commit/2".

    private void transaction() throws Exception {
        consume(pushConsumer("1", "*"), message -> true);
        TransactionMQProducer producer = transactionProducer("1", Driver::plannedVerdict);
        for (int i = 0; i < MESSAGES; i++) {
            for (String plan : new String[] {"commit", "rollback"}) {
                park(producer, message(plan + "/" + i));
            }
        }
        producer.setCompressMsgBodyOverHowmuch(4096);
        park(producer, message("commit/" + text(20_000)));
        awaitMessages(MESSAGES + 1);
        sleep(NO_MORE_CHECKS_MS);
    }

    private void transactionCheck() throws Exception {
        consume(pushConsumer("1", "*"), message -> true);
        TransactionMQProducer producer = transactionProducer("1", Driver::plannedVerdict);
        String[] plans = {
            "unknown,commit", "unknown,rollback", "throw,commit", "throw,rollback", "null,commit",
            "unknown,unknown,commit", "unknown,throw,rollback", "commit", "rollback",
        };
        for (int i = 0; i < 3; i++) {
            for (String plan : plans) {
                park(producer, message(plan + "/" + i));
            }
        }
        awaitMessages(3 * 5);
        sleep(NO_MORE_CHECKS_MS);
    }

    /** Each local transaction runs until its half was checked, and then commits. */
    private void transactionSlow() throws Exception {
        consume(pushConsumer("1", "*"), message -> true);
        Map<String, CountDownLatch> checked = new ConcurrentHashMap<>();
        String[] plans = {"unknown", "commit", "rollback"}; // the verdicts of the checks
        for (String plan : plans) {
            checked.put(plan + "/slow", new CountDownLatch(1));
        }
        TransactionMQProducer producer = transactionProducer("1", (message, check) -> {
            String body = body(message);
            if (check > 0) {
                checked.get(body).countDown();
                return verdict(body.split("/")[0]);
            }
            try {
                if (!checked.get(body).await(TIMEOUT_MS, TimeUnit.MILLISECONDS)) {
                    report("failed", "reason", body + " was not checked");
                }
            } catch (InterruptedException error) {
                throw new IllegalStateException(error);
            }
            sleep(300); // the client does not report when it has sent the verdict of the check
            return LocalTransactionState.COMMIT_MESSAGE;
        });
        for (String plan : plans) {
            park(producer, message(plan + "/slow"));
        }
        awaitMessages(2);
        sleep(NO_MORE_CHECKS_MS);
    }

    /** One of three producers of a group leaves: the broker checks its halves at the others. */
    private void transactionGroup() throws Exception {
        consume(pushConsumer("1", "*"), message -> true);
        List<TransactionMQProducer> producers = new ArrayList<>();
        for (String client : new String[] {"1", "2"}) {
            producers.add(transactionProducer(client, Driver::plannedVerdict));
        }
        for (int i = 0; i < MESSAGES; i++) {
            for (int client = 1; client <= 2; client++) {
                park(producers.get(client - 1), message("unknown,commit/" + client + "/" + i));
            }
        }
        TransactionMQProducer leaving = transactionProducer("gone", Driver::plannedVerdict);
        for (int i = 0; i < MESSAGES; i++) {
            park(leaving, message("unknown,commit/gone/" + i));
        }
        leaving.shutdown();
        awaitMessages(3 * MESSAGES);
        sleep(NO_MORE_CHECKS_MS);
    }

    /** Users may set the immunity property to any text. */
    private void transactionImmunity() throws Exception {
        consume(pushConsumer("1", "*"), message -> true);
        CountDownLatch running = new CountDownLatch(1);
        TransactionMQProducer producer = transactionProducer("1", (message, check) -> {
            if (check == 0 && body(message).startsWith("commit")) {
                running.countDown();
                sleep(3_500); // longer than transactionTimeOut, shorter than its own immunity
            }
            return plannedVerdict(message, check);
        });
        Thread within = new Thread(() -> {
            try {
                park(producer, messageWithImmunity("commit/within", "6"));
            } catch (Exception error) {
                report("failed", "reason", error.toString());
            }
        });
        within.start();
        running.await(TIMEOUT_MS, TimeUnit.MILLISECONDS);
        for (String seconds : new String[] {"5", "1", "-1", "soon"}) {
            park(producer, messageWithImmunity("unknown,commit/" + seconds, seconds));
        }
        within.join(TIMEOUT_MS);
        awaitMessages(5);
        sleep(NO_MORE_CHECKS_MS);
    }

    private Message messageWithImmunity(String body, String seconds) {
        Message message = message(body);
        message.putUserProperty("CHECK_IMMUNITY_TIME_IN_SECONDS", seconds);
        return message;
    }

    /** Returns the verdict for a message; check 0 is the local transaction. */
    private interface Plan {
        LocalTransactionState verdict(Message message, int check);
    }

    private static LocalTransactionState plannedVerdict(Message message, int check) {
        String[] plan = body(message).split("/")[0].split(",");
        return verdict(plan[Math.min(check, plan.length - 1)]);
    }

    private static LocalTransactionState verdict(String name) {
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
        reportSent(body(message), producer.sendMessageInTransaction(message, null));
    }

    private TransactionMQProducer transactionProducer(String name, Plan plan) throws Exception {
        TransactionMQProducer producer =
            new TransactionMQProducer(group + "-transactors", ACL_HOOK);
        producer.setNamesrvAddr(namesrv);
        producer.setMqClientApiTimeout(API_TIMEOUT_MS);
        producer.setInstanceName("transactor-" + name);
        producer.setSendMsgTimeout(5_000);
        Map<String, AtomicInteger> checks = new ConcurrentHashMap<>();
        producer.setTransactionListener(new TransactionListener() {
            @Override
            public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
                report("local", "client", name, "body", body(message),
                    "id", message.getTransactionId());
                return plan.verdict(message, 0);
            }

            @Override
            public LocalTransactionState checkLocalTransaction(MessageExt message) {
                int check = checks.computeIfAbsent(body(message), key -> new AtomicInteger())
                    .incrementAndGet();
                report("checked", "client", name, "body", body(message),
                    "topic", message.getTopic(),
                    "id", message.getTransactionId(), "check", check,
                    "times", message.getUserProperty("TRANSACTION_CHECK_TIMES"),
                    "tag", message.getTags(), "key", message.getKeys(),
                    "colour", message.getUserProperty("colour"),
                    "waited_ms", System.currentTimeMillis() - message.getBornTimestamp());
                return plan.verdict(message, check);
            }
        });
        producer.start();
        shutdowns.add(producer::shutdown);
        return producer;
    }

    // Clients.

    private DefaultMQProducer producer() throws Exception {
        return producer("1");
    }

    private DefaultMQProducer producer(String name) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer(group + "-producers-" + name, ACL_HOOK);
        producer.setNamesrvAddr(namesrv);
        producer.setMqClientApiTimeout(API_TIMEOUT_MS);
        producer.setInstanceName("producer-" + name);
        producer.setSendMsgTimeout(5_000);
        producer.start();
        shutdowns.add(producer::shutdown);
        return producer;
    }

    private DefaultMQPushConsumer pushConsumer(String name, String tags) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group, ACL_HOOK,
            new AllocateMessageQueueAveragely());
        consumer.setNamesrvAddr(namesrv);
        consumer.setMqClientApiTimeout(API_TIMEOUT_MS);
        consumer.setInstanceName(name);
        // A new group queries the route of its retry topic before its first heartbeat creates the
        // topic, and again only 30 s later. So query more often.
        consumer.setPollNameServerInterval(1_000);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setConsumeThreadMin(4);
        consumer.setConsumeThreadMax(4);
        consumer.subscribe(topic, tags);
        shutdowns.add(consumer::shutdown);
        return consumer;
    }

    private DefaultMQPullConsumer pullConsumer(String name) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(group + "-pullers", ACL_HOOK);
        consumer.setNamesrvAddr(namesrv);
        consumer.setMqClientApiTimeout(API_TIMEOUT_MS);
        consumer.setInstanceName("puller-" + name);
        consumer.start();
        shutdowns.add(consumer::shutdown);
        return consumer;
    }

    private DefaultLitePullConsumer litePullConsumer(String name) {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer(group, ACL_HOOK);
        consumer.setNamesrvAddr(namesrv);
        consumer.setMqClientApiTimeout(API_TIMEOUT_MS);
        consumer.setInstanceName(name);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        return consumer;
    }

    private void consume(DefaultMQPushConsumer consumer, Handler handler) throws Exception {
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            boolean consumed = true;
            for (MessageExt message : messages) {
                consumed &= handler.handle(message);
                reportReceived(consumer.getInstanceName(), message);
            }
            context.setDelayLevelWhenNextConsume(1);
            return consumed ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS
                : ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.start();
    }

    private void consumeInOrder(DefaultMQPushConsumer consumer, Handler handler) throws Exception {
        consumer.registerMessageListener((MessageListenerOrderly) (messages, context) -> {
            boolean consumed = true;
            for (MessageExt message : messages) {
                consumed &= handler.handle(message);
                reportReceived(consumer.getInstanceName(), message);
            }
            context.setSuspendCurrentQueueTimeMillis(100);
            return consumed ? ConsumeOrderlyStatus.SUCCESS
                : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT;
        });
        consumer.start();
    }

    /** Pulls from the committed offset of every queue until it has received {@code count}. */
    private void drain(String source, int count) throws Exception {
        DefaultMQPullConsumer consumer = pullConsumer("1");
        int before = receivedCount.get();
        waitUntil(() -> {
            try {
                for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(source)) {
                    long offset = Math.max(0, consumer.fetchConsumeOffset(queue, false));
                    PullResult result = consumer.pull(queue, "*", offset, 32);
                    if (result.getPullStatus() == PullStatus.FOUND) {
                        result.getMsgFoundList()
                            .forEach(message -> reportReceived("pull", message));
                    }
                    consumer.updateConsumeOffset(queue, result.getNextBeginOffset());
                }
            } catch (Exception notYet) {
                report("note", "reason", notYet.toString());
                sleep(500); // the topic has no route before its first message
            }
            return receivedCount.get() - before >= count;
        });
        for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(source)) {
            consumer.getOffsetStore().persist(queue);
        }
    }

    private void poll(DefaultLitePullConsumer consumer, int count) {
        waitUntil(() -> {
            consumer.poll(500)
                .forEach(message -> reportReceived(consumer.getInstanceName(), message));
            return receivedCount.get() >= count;
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

    /** Waits for {@code count} messages, and a moment longer for any that must not arrive. */
    private void awaitMessages(int count) {
        waitUntil(() -> receivedCount.get() >= count);
        sleep(NO_MORE_MESSAGES_MS);
    }

    private static void waitUntil(BooleanSupplier condition) {
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(TIMEOUT_MS);
        while (!condition.getAsBoolean() && System.nanoTime() < deadline) {
            sleep(50);
        }
    }

    private static void sleep(long ms) {
        try {
            Thread.sleep(ms);
        } catch (InterruptedException error) {
            throw new IllegalStateException(error);
        }
    }

    // Events.

    private static String status(SendResult result) {
        return result.getSendStatus() == SendStatus.SEND_OK ? "ok" : result.getSendStatus().name();
    }

    private static void reportSent(String body, SendResult result) {
        report("sent", "body", body, "status", status(result), "id", result.getMsgId(),
            "queue", result.getMessageQueue().getQueueId(), "offset", result.getQueueOffset());
    }

    private void reportReceived(String client, MessageExt message) {
        report("received", "client", client, "body", body(message), "topic", message.getTopic(),
            "times", message.getReconsumeTimes(), "queue", message.getQueueId(),
            "offset", message.getQueueOffset(), "tag", message.getTags(),
            "key", message.getKeys(), "colour", message.getUserProperty("colour"),
            "id", message.getMsgId(),
            "waited_ms", System.currentTimeMillis() - message.getBornTimestamp());
        receivedCount.incrementAndGet();
    }

    private static synchronized void report(String event, Object... pairs) {
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
