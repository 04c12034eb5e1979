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
 * Runs many commands of Apache's mqadmin in one process. Compiles with 4.9.7 and with 5.5.0.
 *
 * <pre>Admin NAMESRV</pre>
 *
 * Reads one command per line, with arguments separated by tabs, and prints one line for each: the
 * output of the command as a JSON string. Additional commands control clients that mqadmin can
 * inspect: produce, consume, received, close.
 */
public final class Admin {
    private static final int SEND_TIMEOUT_MS = 30_000; // the machine may be busy

    private final String namesrv;
    private final List<Runnable> shutdowns = new ArrayList<>();
    private final List<String> receivedBodies = new ArrayList<>();
    private DefaultMQProducer producer;

    private Admin(String namesrv) {
        this.namesrv = namesrv;
    }

    public static void main(String[] arguments) throws Exception {
        Admin admin = new Admin(arguments[0]);
        PrintStream output = new PrintStream(System.out, true, "UTF-8");
        BufferedReader input =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            output.println(quoted(admin.runAndCapture(line.split("\t", -1))));
        }
        System.exit(0);
    }

    private String runAndCapture(String[] command) throws Exception {
        PrintStream out = System.out;
        PrintStream err = System.err;
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        PrintStream captured = new PrintStream(bytes, true, "UTF-8");
        System.setOut(captured);
        System.setErr(captured);
        try {
            run(command);
        } catch (Throwable error) {
            error.printStackTrace(captured);
        } finally {
            System.setOut(out);
            System.setErr(err);
        }
        captured.flush();
        return bytes.toString("UTF-8");
    }

    private void run(String[] command) throws Exception {
        switch (command[0]) {
            case "produce":
                produce(command[1], command[2], Integer.parseInt(command[3]));
                break;
            case "consume":
                consume(command[1], command[2]);
                break;
            case "received":
                synchronized (receivedBodies) {
                    System.out.print(String.join("\n", receivedBodies));
                }
                break;
            case "close":
                shutdowns.forEach(Runnable::run);
                shutdowns.clear();
                producer = null;
                break;
            default:
                MQAdminStartup.main0(command, null);
        }
    }

    /** Sends messages with keys and tags to all queues. The producer traces and stays connected. */
    private void produce(String group, String topic, int count) throws Exception {
        if (producer == null) {
            producer = new DefaultMQProducer(group, null, true, null);
            producer.setNamesrvAddr(namesrv);
            producer.setSendMsgTimeout(SEND_TIMEOUT_MS);
            producer.start();
            shutdowns.add(producer::shutdown);
        }
        for (int number = 0; number < count; number++) {
            byte[] body = ("message-" + number).getBytes(StandardCharsets.UTF_8);
            Message message = new Message(topic, "tag", "key-" + number, body);
            SendResult result =
                producer.send(message, (queues, m, n) -> queues.get((Integer) n % queues.size()),
                    number);
            System.out.println(
                number + " " + result.getMsgId() + " " + result.getOffsetMsgId() + " "
                    + result.getMessageQueue().getQueueId() + " " + result.getQueueOffset());
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
            synchronized (receivedBodies) {
                for (MessageExt message : messages) {
                    receivedBodies.add(new String(message.getBody(), StandardCharsets.UTF_8));
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        shutdowns.add(consumer::shutdown);
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
