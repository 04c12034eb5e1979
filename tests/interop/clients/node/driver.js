'use strict';

// A client from npm, put through one scenario.
//
//     node driver.js CLIENT NAMESRV TOPIC GROUP SCENARIO
//
// C wraps a C++ library, D is JavaScript all through. Tells in JSON lines what was sent and what
// arrived, and judges nothing.

const [which, namesrv, topic, group, scenario] = process.argv.slice(2);
const PATIENCE_MS = 30_000;
const LINGER_MS = 700;
const SETTLE_MS = 3_000; // a broadcast consumer begins at the end: it must be there first
const MESSAGES = 8;

let arrived = 0;
const failures = new Map(); // body -> how often it was refused; C does not tell

const say = (event, more = {}) => process.stdout.write(JSON.stringify({ event, ...more }) + '\n');
const nap = ms => new Promise(resolve => setTimeout(resolve, ms));
const bodies = kind => Array.from({ length: MESSAGES }, (_, number) => `${kind}-${number}`);

function got(message) {
  say('got', { by: '1', ...message });
  arrived += 1;
}

async function arrivals(count) {
  const deadline = Date.now() + PATIENCE_MS;
  while (arrived < count && Date.now() < deadline) await nap(50);
  await nap(LINGER_MS);
}

class C {
  constructor() {
    const { Producer, PushConsumer } = require('rocketmq-nodejs');
    const options = { nameServer: namesrv, logDir: 'client-log' };
    this.producer = new Producer(`${group}-producers`, options);
    this.consumer = new PushConsumer(group, options);
  }

  async consume(isFine, { tags = '*' } = {}) {
    this.consumer.subscribe(topic, tags);
    this.consumer.on('message', (message, ack) => {
      const times = failures.get(message.body) || 0;
      got({ body: message.body, topic: message.topic, tag: message.tags, key: message.keys, times });
      const fine = isFine(message.body, times);
      if (!fine) failures.set(message.body, times + 1);
      ack.done(fine);
    });
    await this.consumer.start();
  }

  async produce() {
    await this.producer.start();
  }

  async send(body, { tag = 'tag' } = {}) {
    const options = { keys: `key-${body.length}`, tags: tag };
    const result = await this.producer.send(topic, body, options);
    say('sent', { body, status: result.status === 0 ? 'ok' : result.statusStr, id: result.msgId });
  }

  async close() {
    await this.producer.shutdown();
    await this.consumer.shutdown();
  }
}

class D {
  constructor() {
    this.ons = require('ali-ons');
    const quiet = () => {};
    this.options = {
      nameSrv: namesrv,
      httpclient: { request: async () => ({ status: 200, data: namesrv }) }, // asked for, not used
      logger: { debug: quiet, info: quiet, warn: quiet, error: quiet },
      accessKeyId: process.env.INTEROP_ACCESS_KEY,
      accessKeySecret: process.env.INTEROP_SECRET_KEY,
    };
    this.open = [];
  }

  // An offset that was never committed is an error to this client, which it then gets over.
  async ready(client) {
    client.on('error', error => say('note', { why: error.message }));
    this.open.push(client);
    await client.ready();
    return client;
  }

  async consume(isFine, { tags = '*', broadcast = false } = {}) {
    const settings = { ...this.options, consumerGroup: group, isBroadcast: broadcast };
    const consumer = new this.ons.Consumer(settings);
    consumer.subscribe(topic, tags, async message => {
      const body = message.body.toString();
      got({
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
      if (!isFine(body, message.reconsumeTimes)) throw new Error('consume it later');
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
    say('sent', {
      body,
      status: result.sendStatus === 'SEND_OK' ? 'ok' : String(result.sendStatus),
      id: result.msgId,
      queue: Number(result.messageQueue.queueId),
    });
  }

  async close() {
    for (const client of this.open.reverse()) await client.close();
  }
}

const scenarios = {
  async sync(my) {
    await my.consume(() => true);
    await my.produce();
    for (const body of bodies('sync')) await my.send(body);
    await arrivals(MESSAGES);
  },

  async big(my) {
    await my.consume(() => true);
    await my.produce();
    for (const size of [4_095, 4_097, 100_000]) {
      let body = '';
      while (body.length < size) body += `${body.length} `;
      await my.send(body.slice(0, size));
    }
    await arrivals(3);
  },

  async delay(my) {
    await my.consume(() => true);
    await my.produce();
    for (const body of bodies('delay').slice(0, 3)) await my.send(body, { level: 1 });
    await arrivals(3);
  },

  async tags(my) {
    await my.consume(() => true, { tags: 'red || green' });
    await my.produce();
    for (const tag of ['blue', 'red', '', 'green', 'redder']) {
      await my.send(`tagged-${tag}`, { tag });
    }
    await arrivals(2);
  },

  // D takes queue 0 for no queue at all, and then any queue. These keys lead to others.
  async sharded(my) {
    await my.consume(() => true);
    await my.produce();
    for (let step = 0; step < 6; step++) {
      for (let order = 0; order < 3; order++) {
        await my.send(`${order}/${step}`, { order: `order ${order + 3}` });
      }
    }
    await arrivals(18);
  },

  async broadcast(my) {
    await my.consume(() => true, { broadcast: true });
    await nap(SETTLE_MS);
    await my.produce();
    for (const body of bodies('broadcast')) await my.send(body);
    await arrivals(MESSAGES);
  },

  async retry(my) {
    await my.consume((body, times) => body === 'fine' || times === 2);
    await my.produce();
    for (const body of ['fine', 'again']) await my.send(body);
    await arrivals(4);
  },
};
scenarios.autocreate = scenarios.sync; // its topic is one that nobody created

(async () => {
  try {
    const my = which === 'C' ? new C() : new D();
    await scenarios[scenario](my);
    await my.close();
    say('done');
  } catch (error) {
    say('failed', { why: `${error.name}: ${error.message}` });
    console.error(error);
  }
  process.kill(process.pid, 'SIGKILL'); // the library of C may hang in an ordinary exit
})();
