'use strict';

// Run a scenario with a client from npm.
//
//     node driver.js CLIENT NAMESRV TOPIC GROUP SCENARIO
//
// rocketmq-nodejs wraps a C++ library, ali-ons is written in JavaScript. The driver prints an event
// as a line of JSON for each message that it sends or receives. The test that started it checks
// these events.

const [clientName, namesrv, topic, group, scenario] = process.argv.slice(2);
// A new group queries the route of its retry topic before the topic exists, and again after 30 s.
const TIMEOUT_MS = 60_000;
const NO_MORE_MESSAGES_MS = 700; // only time can show that nothing more arrives
// A broadcast consumer starts at the end of the queues, and the client does not report when.
const BROADCAST_START_MS = 3_000;
const MESSAGES = 8;

let receivedCount = 0;
// By body, how often its consumption failed; rocketmq-nodejs does not expose reconsumeTimes.
const failures = new Map();

const report = (event, fields = {}) =>
  process.stdout.write(JSON.stringify({ event, ...fields }) + '\n');
const sleep = ms => new Promise(resolve => setTimeout(resolve, ms));
const bodies = kind => Array.from({ length: MESSAGES }, (_, number) => `${kind}-${number}`);

function reportReceived(message) {
  report('received', { client: '1', ...message });
  receivedCount += 1;
}

// Wait for `count` messages, and a moment longer for any that must not arrive.
async function waitFor(count) {
  const deadline = Date.now() + TIMEOUT_MS;
  while (receivedCount < count && Date.now() < deadline) await sleep(50);
  await sleep(NO_MORE_MESSAGES_MS);
}

class RocketmqNodejs {
  constructor() {
    const { Producer, PushConsumer } = require('rocketmq-nodejs');
    const options = { nameServer: namesrv, logDir: 'client-log' };
    this.producer = new Producer(`${group}-producers`, options);
    this.consumer = new PushConsumer(group, options);
  }

  // The handler returns whether the message was consumed.
  async consume(handler, { tags = '*' } = {}) {
    this.consumer.subscribe(topic, tags);
    this.consumer.on('message', (message, ack) => {
      const times = failures.get(message.body) || 0;
      const { body, topic, tags: tag, keys: key } = message;
      reportReceived({ body, topic, tag, key, times });
      const consumed = handler(body, times);
      if (!consumed) failures.set(body, times + 1);
      ack.done(consumed);
    });
    await this.consumer.start();
  }

  async produce() {
    await this.producer.start();
  }

  async send(body, { tag = 'tag' } = {}) {
    const options = { keys: `key-${body.length}`, tags: tag };
    const result = await this.producer.send(topic, body, options);
    report('sent', { body, status: result.status === 0 ? 'ok' : result.statusStr, id: result.msgId });
  }

  async close() {
    await this.producer.shutdown();
    await this.consumer.shutdown();
  }
}

class AliOns {
  constructor() {
    this.ons = require('ali-ons');
    const ignore = () => {};
    this.options = {
      nameSrv: namesrv,
      httpclient: { request: async () => ({ status: 200, data: namesrv }) }, // required, but not used
      logger: { debug: ignore, info: ignore, warn: ignore, error: ignore },
      accessKeyId: process.env.INTEROP_ACCESS_KEY,
      accessKeySecret: process.env.INTEROP_SECRET_KEY,
    };
    this.started = [];
  }

  // The client reports an offset that was never committed as an error, and then continues.
  async ready(client) {
    client.on('error', error => report('note', { reason: error.message }));
    this.started.push(client);
    await client.ready();
    return client;
  }

  async consume(handler, { tags = '*', broadcast = false } = {}) {
    const settings = { ...this.options, consumerGroup: group, isBroadcast: broadcast };
    const consumer = new this.ons.Consumer(settings);
    consumer.subscribe(topic, tags, async message => {
      const body = message.body.toString();
      reportReceived({
        body,
        topic: message.topic,
        tag: message.tags,
        key: message.keys,
        colour: message.properties.colour,
        times: message.reconsumeTimes,
        queue: message.queueId,
        offset: Number(message.queueOffset),
        waited_ms: Date.now() - Number(message.bornTimestamp),
      });
      if (!handler(body, message.reconsumeTimes)) throw new Error('consume it later');
    });
    await this.ready(consumer);
  }

  async produce() {
    const settings = { ...this.options, producerGroup: `${group}-producers` };
    this.producer = await this.ready(new this.ons.Producer(settings));
  }

  async send(body, { tag = 'tag', level = 0, order = undefined } = {}) {
    const message = new this.ons.Message(topic, tag, body);
    message.keys = [`key-${body.length}`];
    message.properties.colour = 'größer';
    if (level) message.delayTimeLevel = level;
    if (order) message.shardingKey = order;
    const result = await this.producer.send(message);
    report('sent', {
      body,
      status: result.sendStatus === 'SEND_OK' ? 'ok' : String(result.sendStatus),
      id: result.msgId,
      queue: Number(result.messageQueue.queueId),
    });
  }

  async close() {
    for (const client of this.started.reverse()) await client.close();
  }
}

const scenarios = {
  async sync(client) {
    await client.consume(() => true);
    await client.produce();
    for (const body of bodies('sync')) await client.send(body);
    await waitFor(MESSAGES);
  },

  async big(client) {
    await client.consume(() => true);
    await client.produce();
    for (const size of [4_095, 4_097, 100_000]) {
      let body = '';
      while (body.length < size) body += `${body.length} `;
      await client.send(body.slice(0, size));
    }
    await waitFor(3);
  },

  async delay(client) {
    await client.consume(() => true);
    await client.produce();
    for (const body of bodies('delay').slice(0, 3)) await client.send(body, { level: 1 });
    await waitFor(3);
  },

  async tags(client) {
    await client.consume(() => true, { tags: 'red || green' });
    await client.produce();
    for (const tag of ['blue', 'red', '', 'green', 'redder']) {
      await client.send(`tagged-${tag}`, { tag });
    }
    await waitFor(2);
  },

  // ali-ons treats queue 0 as "no queue" and then takes any. These keys select other queues.
  async sharded(client) {
    await client.consume(() => true);
    await client.produce();
    for (let step = 0; step < 6; step++) {
      for (let order = 0; order < 3; order++) {
        await client.send(`${order}/${step}`, { order: `order ${order + 3}` });
      }
    }
    await waitFor(18);
  },

  async broadcast(client) {
    await client.consume(() => true, { broadcast: true });
    await sleep(BROADCAST_START_MS);
    await client.produce();
    for (const body of bodies('broadcast')) await client.send(body);
    await waitFor(MESSAGES);
  },

  async retry(client) {
    await client.consume((body, times) => body === 'fine' || times === 2);
    await client.produce();
    for (const body of ['fine', 'again']) await client.send(body);
    await waitFor(4);
  },
};
scenarios.autocreate = scenarios.sync; // the topic does not exist before the first message

(async () => {
  try {
    const clients = { 'rocketmq-nodejs': RocketmqNodejs, 'ali-ons': AliOns };
    const client = new clients[clientName]();
    await scenarios[scenario](client);
    await client.close();
    report('done');
  } catch (error) {
    report('failed', { reason: `${error.name}: ${error.message}` });
    console.error(error);
  }
  process.kill(process.pid, 'SIGKILL'); // the library of rocketmq-nodejs may hang at exit
})();
