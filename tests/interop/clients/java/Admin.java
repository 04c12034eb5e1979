import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.rebalance.AllocateMessageQueueAveragely;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.tools.command.MQAdminStartup;

/**
 * Apache's mqadmin, many commands in one process; compiles against 4.9.7 and 5.5.0.
 *
 * <pre>Admin NAMESRV</pre>
 *
 * Reads one command per line, its words between tabs, and answers each with one line: what it
 * printed, as a JSON string. Besides mqadmin's own there are a few for clients that mqadmin looks
 * at: produce, consume, got, close.
 */
public final class Admin {
    private static final int PATIENCE_MS = 30_000; // the machine may be busy

    private final String namesrv;
    private final List<Runnable> endings = new ArrayList<>();
    private final List<String> got = new ArrayList<>();
    private DefaultMQProducer producer;

    private Admin(String namesrv) {
        this.namesrv = namesrv;
    }

    public static void main(String[] arguments) throws Exception {
        Admin admin = new Admin(arguments[0]);
        PrintStream told = new PrintStream(System.out, true, "UTF-8");
        BufferedReader asked =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = asked.readLine(); line != null; line = asked.readLine()) {
            told.println(quoted(admin.captured(line.split("\t", -1))));
        }
        System.exit(0);
    }

    private String captured(String[] words) throws Exception {
        PrintStream out = System.out;
        PrintStream err = System.err;
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        PrintStream both = new PrintStream(bytes, true, "UTF-8");
        System.setOut(both);
        System.setErr(both);
        try {
            run(words);
        } catch (Throwable error) {
            error.printStackTrace(both);
        } finally {
            System.setOut(out);
            System.setErr(err);
        }
        both.flush();
        return bytes.toString("UTF-8");
    }

    private void run(String[] words) throws Exception {
        switch (words[0]) {
            case "produce":
                produce(words[1], words[2], Integer.parseInt(words[3]));
                break;
            case "consume":
                consume(words[1], words[2]);
                break;
            case "got":
                synchronized (got) {
                    System.out.print(String.join("\n", got));
                }
                break;
            case "close":
                endings.forEach(Runnable::run);
                endings.clear();
                producer = null;
                break;
            default:
                MQAdminStartup.main0(words, null);
        }
    }

    /** Messages over all queues, with a key and a tag each; the producer stays, and traces. */
    private void produce(String group, String topic, int count) throws Exception {
        if (producer == null) {
            producer = new DefaultMQProducer(group, null, true, null);
            producer.setNamesrvAddr(namesrv);
            producer.setSendMsgTimeout(PATIENCE_MS);
            producer.start();
            endings.add(producer::shutdown);
        }
        for (int number = 0; number < count; number++) {
            byte[] body = ("message-" + number).getBytes(StandardCharsets.UTF_8);
            Message message = new Message(topic, "tag", "key-" + number, body);
            SendResult sent =
                producer.send(message, (queues, m, n) -> queues.get((Integer) n % queues.size()),
                    number);
            System.out.println(
                number + " " + sent.getMsgId() + " " + sent.getOffsetMsgId() + " "
                    + sent.getMessageQueue().getQueueId() + " " + sent.getQueueOffset());
        }
    }

    private void consume(String group, String topic) throws Exception {
        DefaultMQPushConsumer consumer =
            new DefaultMQPushConsumer(group, null, new AllocateMessageQueueAveragely(), true, null);
        consumer.setNamesrvAddr(namesrv);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.setPersistConsumerOffsetInterval(500);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            synchronized (got) {
                for (MessageExt message : messages) {
                    got.add(new String(message.getBody(), StandardCharsets.UTF_8));
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        endings.add(consumer::shutdown);
    }

    private static String quoted(String text) {
        StringBuilder quoted = new StringBuilder("\"");
        for (char character : text.toCharArray()) {
            if (character < ' ' || character == '"' || character == '\\' || character > '~') {
                quoted.append(String.format("\\u%04x", (int) character));
            } else {
                quoted.append(character);
            }
        }
        return quoted.append('"').toString();
    }
}
