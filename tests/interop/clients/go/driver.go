// The driver of Apache's Go client: it runs one scenario.
//
//	driver NAMESRV TOPIC GROUP SCENARIO
//
// It writes one JSON object per line about what was sent and what arrived. It judges nothing: the
// test that started it does.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

const (
	patience     = 60 * time.Second // this client asks for routes and queues every 20 to 30 s
	linger       = 700 * time.Millisecond
	noChecksTime = 4 * time.Second // longer than the time before a first check
	messages     = 8
)

var output sync.Mutex

type fields map[string]any

func report(event string, more fields) {
	line := fields{"event": event}
	for name, value := range more {
		line[name] = value
	}
	text, err := json.Marshal(line)
	if err != nil {
		panic(err)
	}
	output.Lock()
	defer output.Unlock()
	fmt.Println(string(text))
}

type driver struct {
	namesrv, topic, group string
	arrived               atomic.Int32
	endings               []func() error
}

// --- scenarios -----------------------------------------------------------------------------------

func (d *driver) sync() error {
	if err := d.consume("*", false, always); err != nil {
		return err
	}
	if err := d.sendAll(bodies("sync")...); err != nil {
		return err
	}
	d.await(messages)
	return nil
}

// autocreate sends to a topic that nobody created. A consumer that starts before it finds no route.
func (d *driver) autocreate() error {
	if err := d.sendAll(bodies("sync")...); err != nil {
		return err
	}
	if err := d.consume("*", false, always); err != nil {
		return err
	}
	d.await(messages)
	return nil
}

func (d *driver) tags() error {
	if err := d.consume("red || green", false, always); err != nil {
		return err
	}
	send, err := d.producer()
	if err != nil {
		return err
	}
	for _, tag := range []string{"blue", "red", "", "green", "redder"} {
		if err := send(d.message("tagged-"+tag, tag)); err != nil {
			return err
		}
	}
	d.await(2)
	return nil
}

// orderly sends the steps of three orders in turn; the sharding key of an order chooses its queue.
func (d *driver) orderly() error {
	if err := d.consume("*", true, always); err != nil {
		return err
	}
	send, err := d.producer(producer.WithQueueSelector(producer.NewHashQueueSelector()))
	if err != nil {
		return err
	}
	for step := range 6 {
		for order := range 3 {
			message := d.message(fmt.Sprintf("%d/%d", order, step), "tag")
			message.WithShardingKey(fmt.Sprintf("order %d", order))
			if err := send(message); err != nil {
				return err
			}
		}
	}
	d.await(18)
	return nil
}

func (d *driver) retry() error {
	err := d.consume("*", false, func(message *primitive.MessageExt) bool {
		return string(message.Body) == "fine" || message.ReconsumeTimes == 2
	})
	if err != nil {
		return err
	}
	if err := d.sendAll("fine", "again"); err != nil {
		return err
	}
	d.await(4)
	return nil
}

// A body begins with its plan: the verdict of the local transaction, then the answers to the checks.

func (d *driver) transaction() error {
	return d.transactions([]string{"commit", "rollback"}, messages, messages)
}

func (d *driver) transactionCheck() error {
	plans := []string{"unknown,commit", "unknown,rollback", "unknown,unknown,commit",
		"unknown,unknown,rollback", "commit", "rollback"}
	return d.transactions(plans, 3, 3*3)
}

func (d *driver) transactions(plans []string, repeats int, committed int) error {
	if err := d.consume("*", false, always); err != nil {
		return err
	}
	parker, err := rocketmq.NewTransactionProducer(&listener{},
		producer.WithNameServer(primitive.NamesrvAddr{d.namesrv}),
		producer.WithGroupName(d.group+"-transactors"),
		producer.WithInstanceName("transactors"))
	if err != nil {
		return err
	}
	if err := parker.Start(); err != nil {
		return err
	}
	d.endings = append(d.endings, parker.Shutdown)
	for number := range repeats {
		for _, plan := range plans {
			message := d.message(fmt.Sprintf("%s/%d", plan, number), "tag")
			result, err := parker.SendMessageInTransaction(context.Background(), message)
			if err != nil {
				return err
			}
			reportSent(message, result.SendResult)
		}
	}
	d.await(committed)
	time.Sleep(noChecksTime)
	return nil
}

// --- the transaction listener --------------------------------------------------------------------

type listener struct {
	checks sync.Map // body -> *atomic.Int32
}

func (l *listener) ExecuteLocalTransaction(
	message *primitive.Message,
) primitive.LocalTransactionState {
	report("local", fields{"client": "1", "body": string(message.Body), "id": message.TransactionId})
	return verdict(string(message.Body), 0)
}

func (l *listener) CheckLocalTransaction(
	message *primitive.MessageExt,
) primitive.LocalTransactionState {
	body := string(message.Body)
	count, _ := l.checks.LoadOrStore(body, &atomic.Int32{})
	check := int(count.(*atomic.Int32).Add(1))
	report("checked", fields{"client": "1", "body": body, "topic": message.Topic, "check": check,
		"times":  message.GetProperty(primitive.PropertyTranscationCheckTimes),
		"tag":    message.GetTags(),
		"key":    message.GetKeys(),
		"colour": message.GetProperty("colour")})
	return verdict(body, check)
}

func verdict(body string, check int) primitive.LocalTransactionState {
	plan := strings.Split(strings.SplitN(body, "/", 2)[0], ",")
	switch plan[min(check, len(plan)-1)] {
	case "commit":
		return primitive.CommitMessageState
	case "rollback":
		return primitive.RollbackMessageState
	default:
		return primitive.UnknowState
	}
}

// --- clients and messages ------------------------------------------------------------------------

func (d *driver) producer(options ...producer.Option) (func(*primitive.Message) error, error) {
	options = append([]producer.Option{
		producer.WithNameServer(primitive.NamesrvAddr{d.namesrv}),
		producer.WithGroupName(d.group + "-producers"),
		producer.WithInstanceName("producers"),
	}, options...)
	sender, err := rocketmq.NewProducer(options...)
	if err != nil {
		return nil, err
	}
	if err := sender.Start(); err != nil {
		return nil, err
	}
	d.endings = append(d.endings, sender.Shutdown)
	return func(message *primitive.Message) error {
		result, err := sender.SendSync(context.Background(), message)
		if err == nil {
			reportSent(message, result)
		}
		return err
	}, nil
}

func (d *driver) sendAll(texts ...string) error {
	send, err := d.producer()
	if err != nil {
		return err
	}
	for _, text := range texts {
		if err := send(d.message(text, "tag")); err != nil {
			return err
		}
	}
	return nil
}

func (d *driver) consume(
	tags string, ordered bool, isFine func(*primitive.MessageExt) bool,
) error {
	reader, err := rocketmq.NewPushConsumer(
		consumer.WithNameServer(primitive.NamesrvAddr{d.namesrv}),
		consumer.WithGroupName(d.group),
		consumer.WithInstance("readers"),
		consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
		consumer.WithConsumerOrder(ordered))
	if err != nil {
		return err
	}
	selector := consumer.MessageSelector{Type: consumer.TAG, Expression: tags}
	err = reader.Subscribe(d.topic, selector,
		func(_ context.Context, batch ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
			result := consumer.ConsumeSuccess
			for _, message := range batch {
				d.received(message)
				if !isFine(message) {
					result = consumer.ConsumeRetryLater
				}
			}
			return result, nil
		})
	if err != nil {
		return err
	}
	d.endings = append(d.endings, reader.Shutdown)
	return reader.Start()
}

func (d *driver) received(message *primitive.MessageExt) {
	report("received", fields{"client": "1", "body": string(message.Body), "topic": message.Topic,
		"times": message.ReconsumeTimes, "queue": message.Queue.QueueId,
		"offset": message.QueueOffset, "tag": message.GetTags(), "key": message.GetKeys(),
		"colour":    message.GetProperty("colour"),
		"waited_ms": time.Now().UnixMilli() - message.BornTimestamp})
	d.arrived.Add(1)
}

func (d *driver) message(body string, tag string) *primitive.Message {
	message := primitive.NewMessage(d.topic, []byte(body))
	message.WithTag(tag)
	message.WithKeys([]string{fmt.Sprintf("key-%d", len(body))})
	message.WithProperty("colour", "größer")
	return message
}

func reportSent(message *primitive.Message, result *primitive.SendResult) {
	status := "ok"
	if result.Status != primitive.SendOK {
		status = fmt.Sprint(result.Status)
	}
	line := fields{"body": string(message.Body), "status": status, "id": result.MsgID}
	if message.GetProperty(primitive.PropertyTransactionPrepared) == "" {
		line["queue"], line["offset"] = result.MessageQueue.QueueId, result.QueueOffset
	}
	report("sent", line)
}

func (d *driver) await(count int) {
	deadline := time.Now().Add(patience)
	for int(d.arrived.Load()) < count && time.Now().Before(deadline) {
		time.Sleep(50 * time.Millisecond)
	}
	time.Sleep(linger)
}

func bodies(kind string) []string {
	texts := make([]string, messages)
	for number := range texts {
		texts[number] = fmt.Sprintf("%s-%d", kind, number)
	}
	return texts
}

func always(*primitive.MessageExt) bool { return true }

func main() {
	rlog.SetLogLevel("warn")
	d := &driver{namesrv: os.Args[1], topic: os.Args[2], group: os.Args[3]}
	scenarios := map[string]func() error{
		"sync":              d.sync,
		"autocreate":        d.autocreate,
		"tags":              d.tags,
		"orderly":           d.orderly,
		"retry":             d.retry,
		"transaction":       d.transaction,
		"transaction-check": d.transactionCheck,
	}
	err := scenarios[os.Args[4]]()
	for _, end := range d.endings {
		if err == nil {
			err = end()
		}
	}
	if err != nil {
		report("failed", fields{"reason": err.Error()})
		os.Exit(1)
	}
	report("done", nil)
}
