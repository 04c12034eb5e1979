import com.fasterxml.jackson.databind.ObjectMapper;
import java.nio.charset.StandardCharsets;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.spring.annotation.ConsumeMode;
import org.apache.rocketmq.spring.annotation.RocketMQMessageListener;
import org.apache.rocketmq.spring.annotation.RocketMQTransactionListener;
import org.apache.rocketmq.spring.core.RocketMQListener;
import org.apache.rocketmq.spring.core.RocketMQLocalTransactionListener;
import org.apache.rocketmq.spring.core.RocketMQLocalTransactionState;
import org.apache.rocketmq.spring.core.RocketMQPushConsumerLifecycleListener;
import org.apache.rocketmq.spring.core.RocketMQTemplate;
import org.springframework.beans.factory.annotation.Value;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.SpringBootConfiguration;
import org.springframework.boot.autoconfigure.EnableAutoConfiguration;
import org.springframework.boot.autoconfigure.condition.ConditionalOnProperty;
import org.springframework.context.ConfigurableApplicationContext;
import org.springframework.context.annotation.Import;
import org.springframework.messaging.Message;
import org.springframework.messaging.support.MessageBuilder;

/**
 * The driver of the Spring Boot starter: it runs one scenario.
 *
 * <pre>SpringDriver NAMESRV TOPIC GROUP SCENARIO</pre>
 *
 * It writes one JSON object per line about what was sent and what arrived. It judges nothing: the
 * test that started it does.
 */
public final class SpringDriver {
    private static final long TIMEOUT_MS = 30_000;
    private static final long SETTLE_MS = 700;
    private static final long NO_MORE_CHECK_MS = 4_000; // longer than the time before a first check
    private static final int MESSAGES = 8;
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final AtomicInteger ARRIVED = new AtomicInteger();

    private final RocketMQTemplate template;
    private final String topic;

    private SpringDriver(RocketMQTemplate template, String topic) {
        this.template = template;
        this.topic = topic;
    }

    public static void main(String[] args) {
        System.setProperty("rocketmq.client.rebalance.waitInterval", "1000"); // 20 s otherwise
        String scenario = args[3];
        Map<String, Object> properties = new LinkedHashMap<>();
        properties.put("rocketmq.name-server", args[0]);
        properties.put("rocketmq.producer.group", args[2] + "-producers");
        properties.put("rocketmq.producer.send-message-timeout", 5_000);
        properties.put("driver.topic", args[1]);
        properties.put("driver.group", args[2]);
        properties.put("driver.tags", scenario.equals("tags") ? "red || green" : "*");
        properties.put("driver.ordered", scenario.equals("orderly"));
        properties.put("driver.scenario", scenario);
        properties.put("logging.level.root", "WARN");
        properties.put("spring.main.banner-mode", "off");
        SpringApplication application = new SpringApplication(Application.class);
        application.setDefaultProperties(properties);
        int code = 0;
        try (ConfigurableApplicationContext context = application.run()) {
            new SpringDriver(context.getBean(RocketMQTemplate.class), args[1]).run(scenario);
            context.close();
            report("done");
        } catch (Throwable error) {
            report("failed", "reason", error.toString());
            error.printStackTrace();
            code = 1;
        }
        System.exit(code);
    }

    private void run(String scenario) {
        switch (scenario) {
            case "sync":
                for (int i = 0; i < MESSAGES; i++) {
                    send("sync-" + i, "tag");
                }
                await(MESSAGES);
                break;
            case "tags":
                for (String tag : new String[] {"blue", "red", "", "green", "redder"}) {
                    send("tagged-" + tag, tag);
                }
                await(2);
                break;
            case "orderly":
                for (int step = 0; step < 6; step++) {
                    for (int order = 0; order < 3; order++) {
                        String body = order + "/" + step;
                        reportSent(body, template.syncSendOrderly(
                            topic + ":tag", message(body), "order " + order), true);
                    }
                }
                await(18);
                break;
            case "retry":
                send("fine", "tag");
                send("again", "tag");
                await(4);
                break;
            case "transaction":
                transactions(MESSAGES, MESSAGES, "commit", "rollback");
                break;
            case "transaction-check":
                transactions(3, 3 * 4, "unknown,commit", "unknown,rollback", "throw,commit",
                    "unknown,unknown,commit", "unknown,throw,rollback", "commit", "rollback");
                break;
            default:
                throw new IllegalArgumentException(scenario);
        }
    }

    // A body begins with its plan: the verdict of the local transaction, then the answers to checks.

    private void transactions(int repeats, int committed, String... plans) {
        for (int i = 0; i < repeats; i++) {
            for (String plan : plans) {
                String body = plan + "/" + i;
                reportSent(body, template.sendMessageInTransaction(topic + ":tag", message(body), null),
                    false);
            }
        }
        await(committed);
        nap(NO_MORE_CHECK_MS);
    }

    private void send(String body, String tag) {
        String destination = tag.isEmpty() ? topic : topic + ":" + tag;
        reportSent(body, template.syncSend(destination, message(body)), true);
    }

    private static Message<String> message(String body) {
        return MessageBuilder.withPayload(body)
            .setHeader("KEYS", "key-" + body.length())
            .setHeader("colour", "größer")
            .build();
    }

    /** The place in the response to a half is in the half queue, so it is left out. */
    private static void reportSent(String body, SendResult result, boolean withPlace) {
        String status = result.getSendStatus() == SendStatus.SEND_OK ? "ok"
            : result.getSendStatus().toString();
        if (withPlace) {
            report("sent", "body", body, "status", status, "id", result.getMsgId(),
                "queue", result.getMessageQueue().getQueueId(), "offset", result.getQueueOffset());
        } else {
            report("sent", "body", body, "status", status, "id", result.getMsgId());
        }
    }

    private static void await(int count) {
        long deadline = System.currentTimeMillis() + TIMEOUT_MS;
        while (ARRIVED.get() < count && System.currentTimeMillis() < deadline) {
            nap(50);
        }
        nap(SETTLE_MS);
    }

    private static void nap(long ms) {
        try {
            Thread.sleep(ms);
        } catch (InterruptedException error) {
            throw new IllegalStateException(error);
        }
    }

    private static synchronized void report(String event, Object... fields) {
        Map<String, Object> line = new LinkedHashMap<>(Collections.singletonMap("event", event));
        for (int i = 0; i < fields.length; i += 2) {
            line.put((String) fields[i], fields[i + 1]);
        }
        try {
            System.out.println(JSON.writeValueAsString(line));
        } catch (Exception error) {
            throw new IllegalStateException(error);
        }
    }

    /** Names its beans instead of scanning: this class is in no package. */
    @SpringBootConfiguration
    @EnableAutoConfiguration
    @Import({ConcurrentReader.class, OrderedReader.class, Transactions.class})
    static class Application {
    }

    /** What both readers do: report a message, and fail as the scenario says. */
    abstract static class Reader
        implements RocketMQListener<MessageExt>, RocketMQPushConsumerLifecycleListener {
        @Value("${driver.scenario}")
        private String scenario;

        @Override
        public void onMessage(MessageExt message) {
            String body = new String(message.getBody(), StandardCharsets.UTF_8);
            report("received", "client", "1", "body", body, "topic", message.getTopic(),
                "times", message.getReconsumeTimes(), "queue", message.getQueueId(),
                "offset", message.getQueueOffset(), "tag", message.getTags(),
                "key", message.getKeys(), "colour", message.getUserProperty("colour"));
            ARRIVED.incrementAndGet();
            if (scenario.equals("retry") && body.equals("again")
                && message.getReconsumeTimes() < 2) {
                throw new IllegalStateException("as planned");
            }
        }

        @Override
        public void prepareStart(DefaultMQPushConsumer consumer) {
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
            // The route of a new group's retry topic appears after its first heartbeat.
            consumer.setPollNameServerInterval(1_000);
        }
    }

    @ConditionalOnProperty(name = "driver.ordered", havingValue = "false")
    @RocketMQMessageListener(topic = "${driver.topic}", consumerGroup = "${driver.group}",
        selectorExpression = "${driver.tags}", delayLevelWhenNextConsume = 1)
    static class ConcurrentReader extends Reader {
    }

    @ConditionalOnProperty(name = "driver.ordered", havingValue = "true")
    @RocketMQMessageListener(topic = "${driver.topic}", consumerGroup = "${driver.group}",
        consumeMode = ConsumeMode.ORDERLY)
    static class OrderedReader extends Reader {
    }

    @RocketMQTransactionListener
    static class Transactions implements RocketMQLocalTransactionListener {
        private final Map<String, AtomicInteger> checks = new ConcurrentHashMap<>();

        @Override
        public RocketMQLocalTransactionState executeLocalTransaction(
            Message message, Object argument) {
            String body = body(message);
            report("local", "client", "1", "body", body);
            return verdict(body, 0);
        }

        @Override
        public RocketMQLocalTransactionState checkLocalTransaction(Message message) {
            String body = body(message);
            int check = checks.computeIfAbsent(body, none -> new AtomicInteger())
                .incrementAndGet();
            Map<String, Object> headers = message.getHeaders();
            report("checked", "client", "1", "body", body, "topic", headers.get("rocketmq_TOPIC"),
                "check", check, "times", headers.get("TRANSACTION_CHECK_TIMES"),
                "tag", headers.get("rocketmq_TAGS"), "key", headers.get("rocketmq_KEYS"),
                "colour", headers.get("colour"));
            return verdict(body, check);
        }

        private static String body(Message<?> message) {
            Object payload = message.getPayload();
            return payload instanceof byte[]
                ? new String((byte[]) payload, StandardCharsets.UTF_8) : payload.toString();
        }

        private static RocketMQLocalTransactionState verdict(String body, int check) {
            String[] plan = body.split("/")[0].split(",");
            switch (plan[Math.min(check, plan.length - 1)]) {
                case "commit":
                    return RocketMQLocalTransactionState.COMMIT;
                case "rollback":
                    return RocketMQLocalTransactionState.ROLLBACK;
                case "throw":
                    throw new IllegalStateException("as planned");
                default:
                    return RocketMQLocalTransactionState.UNKNOWN;
            }
        }
    }
}
