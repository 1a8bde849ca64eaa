// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 OR BSD-3-Clause
/* Completion queues, in every context they are polled in. */
#include <linux/delay.h>

#include "kernel-verbs.h"

/* Messages from one end to the other, some at a time. */
static void traffic(struct pair *p, unsigned int count)
{
	struct buffer *from = make_buffer(4096), *to = make_buffer(4096);
	unsigned int i, j;

	fill(from->data, 4096, count);
	for (i = 0; i < count; i += 8) {
		struct receive *receives[8];
		struct request *requests[8];

		for (j = 0; j < 8; j++)
			receives[j] = receive_into(&p->b, to, 4096);
		for (j = 0; j < 8; j++) {
			requests[j] = make_request(&p->a, IB_WR_SEND);
			with_buffer(&p->a, requests[j], from, 0, 512 * (j + 1));
			post(&p->a, requests[j]);
		}
		for (j = 0; j < 8; j++) {
			expect_ok(&requests[j]->op, IB_WC_SEND);
			expect_ok(&receives[j]->op, IB_WC_RECV);
			EQ(receives[j]->op.wc.byte_len, 512 * (j + 1));
			CHECK(receives[j]->op.wc.qp == p->b.qp);
		}
		CHECK(filled(to->data, 4096, count));
	}
}

static void polled_in(enum ib_poll_context context, bool in_softirq)
{
	struct pair p = PAIR(.polled = true, .context = context);
	struct buffer *to = make_buffer(64);
	struct receive *receive;
	struct request *request;

	traffic(&p, 64);
	receive = receive_into(&p.b, to, 64);
	request = make_request(&p.a, IB_WR_SEND);
	post(&p.a, request);
	expect_ok(&request->op, IB_WC_SEND);
	expect_ok(&receive->op, IB_WC_RECV);
	EQ(request->op.in_softirq, in_softirq);
	EQ(receive->op.in_softirq, in_softirq);
}

TEST(cq_poll_direct)
{
	polled_in(IB_POLL_DIRECT, false);
}

TEST(cq_poll_softirq)
{
	polled_in(IB_POLL_SOFTIRQ, true);
}

TEST(cq_poll_workqueue)
{
	polled_in(IB_POLL_WORKQUEUE, false);
}

TEST(cq_poll_unbound_workqueue)
{
	polled_in(IB_POLL_UNBOUND_WORKQUEUE, false);
}

/* No completion by itself: whoever polls directly says when. */
TEST(cq_direct_waits_for_poll)
{
	struct pair p = PAIR();
	struct request *request = make_request(&p.a, IB_WR_SEND);
	struct receive *receive = receive_into(&p.b, NULL, 0);

	post(&p.a, request);
	expect_ok(&receive->op, IB_WC_RECV);
	msleep(20);
	CHECK(!completion_done(&request->op.done));
	expect_ok(&request->op, IB_WC_SEND);
}

/* Completions of one queue pair come in the order of its work requests. */
TEST(cq_order)
{
	struct pair p = PAIR(.polled = true, .context = IB_POLL_SOFTIRQ);
	struct receive *receives[32];
	struct request *requests[32];
	int i;

	for (i = 0; i < 32; i++)
		receives[i] = receive_into(&p.b, NULL, 0);
	for (i = 0; i < 32; i++) {
		requests[i] = make_request(&p.a, IB_WR_SEND);
		post(&p.a, requests[i]);
	}
	for (i = 0; i < 32; i++) {
		expect_ok(&requests[i]->op, IB_WC_SEND);
		expect_ok(&receives[i]->op, IB_WC_RECV);
		CHECK(!i || requests[i - 1]->op.order < requests[i]->op.order);
		CHECK(!i || receives[i - 1]->op.order < receives[i]->op.order);
	}
}

/* Several queue pairs, and both of their queues, complete to one. */
TEST(cq_shared_by_queue_pairs)
{
	struct ib_cq *cq = make_cq(2048, IB_POLL_WORKQUEUE);
	struct pair p = PAIR(.cq = cq), q = PAIR(.cq = cq);

	traffic(&p, 32);
	traffic(&q, 32);
	traffic(&p, 32);
}

/* One on each vector. */
static void undo_free_cq(void *what)
{
	ib_free_cq(what);
}

TEST(cq_vectors)
{
	int vector;

	for (vector = 0; vector < device->num_comp_vectors && vector < 8; vector++) {
		struct ib_cq *cq = ib_alloc_cq(device, NULL, 256, vector, IB_POLL_SOFTIRQ);
		struct pair p;

		CHECK(!IS_ERR(cq));
		defer(UNDO_CQ, undo_free_cq, cq);
		p = PAIR(.cq = cq);
		traffic(&p, 8);
	}
}

struct pooled {
	struct ib_cq *cq;
	unsigned int entries;
};

static void undo_pooled(void *what)
{
	struct pooled *pooled = what;

	ib_cq_pool_put(pooled->cq, pooled->entries);
}

static struct ib_cq *pooled_cq(unsigned int entries, enum ib_poll_context context)
{
	struct pooled *pooled = memory(sizeof(*pooled));

	pooled->cq = ib_cq_pool_get(device, entries, 0, context);
	pooled->entries = entries;
	if (IS_ERR(pooled->cq))
		fail("ib_cq_pool_get: %ld", PTR_ERR(pooled->cq));
	defer(UNDO_CQ, undo_pooled, pooled);
	return pooled->cq;
}

/* Users share completion queues through the core's pool. */
static void from_pool(enum ib_poll_context context)
{
	struct ib_cq *one = pooled_cq(256, context), *two = pooled_cq(256, context);
	struct pair p = PAIR(.cq = one), q = PAIR(.cq = two);

	CHECK(one == two);
	traffic(&p, 32);
	traffic(&q, 32);
}

TEST(cq_pool_softirq)
{
	from_pool(IB_POLL_SOFTIRQ);
}

TEST(cq_pool_workqueue)
{
	from_pool(IB_POLL_WORKQUEUE);
}

TEST(cq_pool_unbound_workqueue)
{
	from_pool(IB_POLL_UNBOUND_WORKQUEUE);
}

/* More than one queue can hold: the pool makes another. */
TEST(cq_pool_grows)
{
	struct ib_cq *one = pooled_cq(16, IB_POLL_SOFTIRQ), *other = NULL;
	unsigned int used = 16;
	struct pair p;

	while (used < 2 * one->cqe && !other) {
		struct ib_cq *cq = pooled_cq(one->cqe / 4, IB_POLL_SOFTIRQ);

		used += one->cqe / 4;
		if (cq != one)
			other = cq;
	}
	CHECK(other);
	p = PAIR(.cq = other);
	traffic(&p, 16);
}

TEST(cq_too_large)
{
	struct ib_cq *cq = ib_alloc_cq(device, NULL, device->attrs.max_cqe + 1, 0, IB_POLL_DIRECT);

	if (!IS_ERR(cq)) {
		ib_free_cq(cq);
		fail("a queue larger than the largest");
	}
}

/* As large as storage protocols make them, and larger. */
TEST(cq_large)
{
	struct ib_cq_init_attr attr = { .cqe = min(device->attrs.max_cqe, 100000) };
	struct ib_cq *cq = ib_create_cq(device, NULL, NULL, NULL, &attr);

	if (IS_ERR(cq))
		fail("ib_create_cq(%d): %ld", attr.cqe, PTR_ERR(cq));
	CHECK(cq->cqe >= attr.cqe);
	ib_destroy_cq(cq);
}

/* Queues without the core's polling. */

static atomic_t raw_events;

static void raw_event(struct ib_cq *cq, void *context)
{
	atomic_inc(&raw_events);
}

static void undo_raw_cq(void *what)
{
	ib_destroy_cq(what);
}

static struct ib_cq *raw_cq(void)
{
	struct ib_cq_init_attr attr = { .cqe = 256 };
	struct ib_cq *cq = ib_create_cq(device, raw_event, NULL, NULL, &attr);

	if (IS_ERR(cq))
		fail("ib_create_cq: %ld", PTR_ERR(cq));
	CHECK(cq->cqe >= 256);
	defer(UNDO_CQ, undo_raw_cq, cq);
	atomic_set(&raw_events, 0);
	return cq;
}

static void raw_poll(struct ib_cq *cq, struct ib_wc *wc)
{
	int i, got = 0;

	for (i = 0; i < 2000 && !got; i++) {
		got = ib_poll_cq(cq, 1, wc);
		CHECK(got >= 0);
		if (!got)
			usleep_range(500, 1000);
	}
	EQ(got, 1);
}

static void raw_send(struct pair *p, int flags)
{
	struct request *request = make_request(&p->a, IB_WR_SEND);

	request->wr.wr_id = 77;
	request->wr.send_flags = flags;
	post(&p->a, request);
}

static void raw_receive(struct pair *p, u64 id)
{
	struct receive *receive = make_receive(p->b.recv_cq);

	receive->wr.wr_id = id;
	post_receive(&p->b, receive);
}

static bool raw_happens(int events)
{
	int i;

	for (i = 0; i < 1000 && atomic_read(&raw_events) < events; i++)
		msleep(2);
	return atomic_read(&raw_events) == events;
}

/* An armed queue gives one event, and none until it is armed again. */
TEST(cq_notify_once)
{
	struct ib_cq *cq = raw_cq();
	struct pair p = PAIR(.cq = cq);
	struct ib_wc wc;
	int i;

	for (i = 0; i < 3; i++)
		raw_receive(&p, 100 + i);
	raw_send(&p, 0);
	raw_poll(cq, &wc);
	EQ(wc.status, IB_WC_SUCCESS);
	EQ(wc.wr_id, 100);
	EQ(wc.opcode, IB_WC_RECV);
	EQ(atomic_read(&raw_events), 0);
	OK(ib_req_notify_cq(cq, IB_CQ_NEXT_COMP));
	raw_send(&p, 0);
	CHECK(raw_happens(1));
	raw_send(&p, 0);
	raw_poll(cq, &wc);
	raw_poll(cq, &wc);
	EQ(wc.wr_id, 102);
	msleep(20);
	EQ(atomic_read(&raw_events), 1);
	EQ(ib_poll_cq(cq, 1, &wc), 0);
}

/* Armed for solicited completions, only those give an event. */
TEST(cq_notify_solicited)
{
	struct ib_cq *cq = raw_cq();
	struct pair p = PAIR(.cq = cq);
	struct ib_wc wc;

	raw_receive(&p, 1);
	raw_receive(&p, 2);
	OK(ib_req_notify_cq(cq, IB_CQ_SOLICITED));
	raw_send(&p, 0);
	raw_poll(cq, &wc);
	msleep(20);
	EQ(atomic_read(&raw_events), 0);
	raw_send(&p, IB_SEND_SOLICITED);
	CHECK(raw_happens(1));
	raw_poll(cq, &wc);
	EQ(wc.wr_id, 2);
}

/* Arming says when there are completions that no event will come for. */
TEST(cq_missed_events)
{
	struct ib_cq *cq = raw_cq();
	struct pair p = PAIR(.cq = cq);
	struct ib_wc wc;
	int i;

	EQ(ib_req_notify_cq(cq, IB_CQ_NEXT_COMP | IB_CQ_REPORT_MISSED_EVENTS), 0);
	raw_receive(&p, 1);
	raw_receive(&p, 2);
	raw_send(&p, 0);
	CHECK(raw_happens(1));
	for (i = 0; i < 1000 && !ib_req_notify_cq(cq, IB_CQ_NEXT_COMP | IB_CQ_REPORT_MISSED_EVENTS); i++)
		msleep(1);
	EQ(ib_req_notify_cq(cq, IB_CQ_NEXT_COMP | IB_CQ_REPORT_MISSED_EVENTS), 1);
	raw_poll(cq, &wc);
	EQ(ib_req_notify_cq(cq, IB_CQ_NEXT_COMP | IB_CQ_REPORT_MISSED_EVENTS), 0);
	raw_send(&p, 0);
	raw_poll(cq, &wc);
	EQ(wc.wr_id, 2);
}

TEST(cq_moderation)
{
	struct ib_cq *cq = raw_cq();
	struct pair p = PAIR(.cq = cq);
	struct ib_wc wc;
	int i, ret = rdma_set_cq_moderation(cq, 4, 50);

	if (ret == -EOPNOTSUPP)
		skip("the device does not moderate events");
	OK(ret);
	for (i = 0; i < 4; i++)
		raw_receive(&p, i);
	OK(ib_req_notify_cq(cq, IB_CQ_NEXT_COMP));
	for (i = 0; i < 4; i++)
		raw_send(&p, 0);
	CHECK(raw_happens(1));
	for (i = 0; i < 4; i++)
		raw_poll(cq, &wc);
	OK(rdma_set_cq_moderation(cq, 0, 0));
}

/*
 * ib_free_cq takes back the work that polls the queue before it has the driver destroy it, and frees
 * it after that. An event in between has the core begin the work again: it must be over when the
 * driver has destroyed the queue.
 */
static int (*destroy_cq)(struct ib_cq *cq, struct ib_udata *udata);
static unsigned int busy_after_destroy;

static void poll_slowly(struct work_struct *work)
{
	msleep(300);
}

static int event_and_destroy(struct ib_cq *cq, struct ib_udata *udata)
{
	int ret;

	INIT_WORK(&cq->work, poll_slowly);
	queue_work(cq->comp_wq, &cq->work);
	ret = destroy_cq(cq, udata);
	busy_after_destroy = work_busy(&cq->work);
	cancel_work_sync(&cq->work);
	return ret;
}

static void freed_with_late_event(enum ib_poll_context context)
{
	struct ib_cq *cq = make_cq(16, context);

	forget(cq);
	destroy_cq = device->ops.destroy_cq;
	device->ops.destroy_cq = event_and_destroy;
	ib_free_cq(cq);
	device->ops.destroy_cq = destroy_cq;
	EQ(busy_after_destroy, 0);
}

TEST(cq_event_while_freed_workqueue)
{
	freed_with_late_event(IB_POLL_WORKQUEUE);
}

TEST(cq_event_while_freed_unbound_workqueue)
{
	freed_with_late_event(IB_POLL_UNBOUND_WORKQUEUE);
}

const struct test cq_tests[] = {
	ENTRY(cq_poll_direct),
	ENTRY(cq_poll_softirq),
	ENTRY(cq_poll_workqueue),
	ENTRY(cq_poll_unbound_workqueue),
	ENTRY(cq_direct_waits_for_poll),
	ENTRY(cq_order),
	ENTRY(cq_shared_by_queue_pairs),
	ENTRY(cq_vectors),
	ENTRY(cq_pool_softirq),
	ENTRY(cq_pool_workqueue),
	ENTRY(cq_pool_unbound_workqueue),
	ENTRY(cq_pool_grows),
	ENTRY(cq_too_large),
	ENTRY(cq_large),
	ENTRY(cq_notify_once),
	ENTRY(cq_notify_solicited),
	ENTRY(cq_missed_events),
	ENTRY(cq_moderation),
	ENTRY(cq_event_while_freed_workqueue),
	ENTRY(cq_event_while_freed_unbound_workqueue),
	{},
};
