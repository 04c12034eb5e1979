import static org.apache.rocketmq.client.producer.LocalTransactionState.COMMIT_MESSAGE;
import static org.apache.rocketmq.client.producer.LocalTransactionState.ROLLBACK_MESSAGE;
import static org.apache.rocketmq.client.producer.LocalTransactionState.UNKNOW;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * The Java twin of examples/transaction_listener.py: the same program for RocketMQ's own client, with
 * the same table at the end. It takes SERVERS and WAIT_S from the environment.
 */
public class TransactionListenerExample {
    static final String TOPIC = "TopicTest1234";
    /** Messages that were checked as often as the broker allows. */
    static final String STRANDED_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC";
    static final String[] TAGS = {"TagA", "TagB", "TagC", "TagD", "TagE"};
    static final LocalTransactionState[] STATES = {UNKNOW, COMMIT_MESSAGE, ROLLBACK_MESSAGE};

    static class RemainderListener implements TransactionListener {
        /** Answers to checks, by transaction id. */
        final Map<String, LocalTransactionState> answers = new ConcurrentHashMap<>();
        /** A database in a real application. */
        private final Map<String, LocalTransactionState> states = new ConcurrentHashMap<>();
        private final AtomicInteger index = new AtomicInteger();

        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object arg) {
            states.put(message.getTransactionId(), STATES[index.getAndIncrement() % STATES.length]);
            return UNKNOW;
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            // A transaction of an earlier run is not in the map: its state is not known.
            LocalTransactionState answer = states.getOrDefault(message.getTransactionId(), UNKNOW);
            answers.put(message.getTransactionId(), answer);
            return answer;
        }
    }

    public static void main(String[] arguments) throws Exception {
        String servers = System.getenv().getOrDefault("SERVERS", "127.0.0.1:9876");
        long waitMs = Math.round(Double.parseDouble(System.getenv().getOrDefault("WAIT_S", "60")) * 1000);
        RemainderListener listener = new RemainderListener();
        Map<String, String> topics = new ConcurrentHashMap<>();
        ExecutorService executor = Executors.newFixedThreadPool(5);

        TransactionMQProducer producer = new TransactionMQProducer("listener-example-java");
        producer.setNamesrvAddr(servers);
        producer.setTransactionListener(listener);
        producer.setExecutorService(executor);
        producer.start();
        DefaultMQPushConsumer consumer = startConsumer(servers, topics);

        List<String> transactionIds = sendAll(producer);
        System.out.printf("10 messages sent; waiting up to %d s for the checks%n", waitMs / 1000);
        long deadline = System.nanoTime() + waitMs * 1_000_000;
        while (System.nanoTime() < deadline && hasOpen(transactionIds, listener, topics)) {
            Thread.sleep(100);
        }
        consumer.shutdown();
        producer.shutdown();
        executor.shutdown();
        printTable(transactionIds, listener, topics);
    }

    static DefaultMQPushConsumer startConsumer(String servers, Map<String, String> topics) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("listener-example-java-reader");
        consumer.setNamesrvAddr(servers);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(TOPIC, "*");
        consumer.subscribe(STRANDED_TOPIC, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) {
                topics.put(message.getMsgId(), message.getTopic());
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        return consumer;
    }

    static List<String> sendAll(TransactionMQProducer producer) throws Exception {
        List<String> transactionIds = new ArrayList<>();
        for (int number = 0; number < 10; number++) {
            byte[] body = ("Hello RocketMQ " + number).getBytes(StandardCharsets.UTF_8);
            Message message = new Message(TOPIC, TAGS[number % TAGS.length], "KEY" + number, body);
            transactionIds.add(producer.sendMessageInTransaction(message, null).getTransactionId());
        }
        return transactionIds;
    }

    static boolean hasOpen(List<String> transactionIds, RemainderListener listener, Map<String, String> topics) {
        return transactionIds.stream().anyMatch(id -> resultOf(id, listener, topics).equals("open"));
    }

    static String resultOf(String transactionId, RemainderListener listener, Map<String, String> topics) {
        if (topics.containsKey(transactionId)) {
            return topics.get(transactionId).equals(TOPIC) ? "delivered" : "stranded";
        }
        return listener.answers.get(transactionId) == ROLLBACK_MESSAGE ? "rolled back" : "open";
    }

    static void printTable(List<String> transactionIds, RemainderListener listener, Map<String, String> topics) {
        System.out.printf("%-6s%-6s%-10s%s%n", "key", "tag", "check", "result");
        for (int number = 0; number < transactionIds.size(); number++) {
            String id = transactionIds.get(number);
            String check = listener.answers.containsKey(id) ? shortName(listener.answers.get(id)) : "";
            System.out.printf("%-6s%-6s%-10s%s%n",
                "KEY" + number, TAGS[number % TAGS.length], check, resultOf(id, listener, topics));
        }
    }

    static String shortName(LocalTransactionState state) {
        return state == UNKNOW ? "UNKNOWN" : state.name().replace("_MESSAGE", "");
    }
}
